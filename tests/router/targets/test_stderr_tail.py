"""An engine's standard error is passed on by line, and its last line kept."""

import asyncio

import pytest

from router.targets.stderr_tail import MAX_LINE_BYTES, StderrTail


async def read(*chunks: bytes) -> StderrTail:
    stream = asyncio.StreamReader()
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    tail = StderrTail("edge", stream)
    await tail.finish()
    return tail


async def test_lines_are_named_and_the_last_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    tail = await read(b"10 %\r20 %\r\nerr", b"or: no model\n\n")
    assert tail.last_line == "error: no model"
    assert capsys.readouterr().err == "edge | 10 %\nedge | 20 %\nedge | error: no model\n"


async def test_an_unfinished_line_counts_and_bad_bytes_do_not_hurt() -> None:
    assert (await read(b"a\nb\xff")).last_line == "b\ufffd"


async def test_an_endless_line_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    await read(b"x" * 3 * MAX_LINE_BYTES)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= MAX_LINE_BYTES + len("edge | ")


async def test_the_child_is_read_on_when_our_own_stderr_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(_text: str) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("sys.stderr.write", gone)
    assert (await read(b"one\n", b"two\n")).last_line == "two"


async def test_a_pipe_that_stays_open_is_not_awaited_forever() -> None:
    tail = StderrTail("edge", asyncio.StreamReader())
    await asyncio.wait_for(tail.finish(), 3)
