"""`tidegate ask` streams an answer and says who gave it; errors are one line and exit code 1."""

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result
from fake_targets import EASY, open_door
from fake_upstream import (
    DONE,
    HELLO,
    ROLE,
    STOP,
    chunk,
    error,
    event,
    fake_upstream,
    hang_up,
    reply,
    sse,
)

from router.cli import main

ASK = sse(ROLE, HELLO, chunk({"content": ", 世界"}), STOP, DONE)


async def run(*arguments: str, stdin: str | None = None) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, arguments, stdin)


async def test_the_answer_goes_to_stdout_and_the_decision_to_stderr() -> None:
    async with fake_upstream(ASK) as edge, open_door(edge=edge) as door:
        done = await run("ask", EASY, "--url", door.url, "--max-tokens", "5", "--system", "Be kind")
    assert done.exit_code == 0
    assert done.stdout == "Hello, 世界\n"
    assert done.stderr.startswith("edge via edge, complexity 0.")
    assert "rule easy" in done.stderr
    body = edge.requests[0][2]
    assert body["messages"][0] == {"role": "system", "content": "Be kind"}
    assert body["max_completion_tokens"] == 5
    assert body["temperature"] == 0


@pytest.mark.parametrize(("target", "words"), [("| true", ""), ("> /dev/full", "No space left")])
async def test_an_output_that_takes_nothing_is_not_blamed_on_the_daemon(
    target: str, words: str
) -> None:
    long = sse(ROLE, *[HELLO] * 3, 0.3, *[HELLO] * 3, STOP, DONE)
    async with fake_upstream(long) as edge, open_door(edge=edge) as door:
        line = f'"$0" -m router.cli ask "{EASY}" --url {door.url} {target}'
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", line, sys.executable, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        said = (await process.stderr.read()).decode()
        await process.wait()
    assert "connection" not in said
    assert "Traceback" not in said
    assert words in said


async def test_a_url_that_is_none_is_told_so() -> None:
    for url in ("foo", "ftp://a", "http://a b/", "http://a:99999"):
        done = await run("ask", EASY, "--url", url)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "is no URL of a daemon" in done.stderr


async def test_chunks_without_text_are_passed_over() -> None:
    odd = [event({"usage": {}, "error": None}), event({"choices": [{"index": 0, "delta": None}]})]
    async with (
        fake_upstream(sse(ROLE, *odd, HELLO, *odd, STOP, DONE)) as edge,
        open_door(edge=edge) as door,
    ):
        done = await run("ask", EASY, "--url", door.url)
    assert (done.exit_code, done.stdout) == (0, "Hello\n")


async def test_a_failover_is_mentioned() -> None:
    async with (
        fake_upstream(hang_up) as edge,
        fake_upstream(ASK) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
    ):
        done = await run("ask", EASY, "--url", f"{door.url}/v1/")
    assert "cloud via cloud" in done.stderr
    assert "after edge:upstream_error" in done.stderr


async def test_a_prompt_can_come_from_stdin() -> None:
    async with fake_upstream(ASK) as edge, open_door(edge=edge) as door:
        await run("ask", "-", "--url", door.url, stdin="from a pipe")
    assert edge.requests[0][2]["messages"][0]["content"] == "from a pipe"


async def test_an_error_answer_is_one_line_and_exit_code_1() -> None:
    async with fake_upstream(reply(error("odd"), 400)) as edge, open_door(edge=edge) as door:
        for options, words in (
            (["--model", "gpt-9"], "no model of this name"),
            (["--model", "edge"], "odd"),
        ):
            done = await run("ask", "hi", "--url", door.url, *options)
            assert done.exit_code == 1
            assert words in done.stderr
            assert done.stdout == ""


async def test_a_broken_answer_is_exit_code_1_after_its_text() -> None:
    async with fake_upstream(sse(ROLE, HELLO, 0.05)) as edge, open_door(edge=edge) as door:
        done = await run("ask", "hi", "--url", door.url)
    assert done.exit_code == 1
    assert done.stdout == "Hello"
    assert "broke off" in done.stderr


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "tidegate serve"),
        ("nonsense", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:99999", "http://127.0.0.1:8080"),
        ("http://[::1", "http://127.0.0.1:8080"),
    ],
)
async def test_without_a_daemon_it_says_how_to_start_one(url: str, words: str) -> None:
    done = await run("ask", "hi", "--url", url)
    assert done.exit_code == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


async def test_the_address_comes_from_the_configuration(
    tmp_path_factory: pytest.TempPathFactory, unused_tcp_port_factory: Callable[[], int]
) -> None:
    port = unused_tcp_port_factory()
    config = tmp_path_factory.mktemp("c") / "config.yaml"
    config.write_text(f"listen: {{port: {port}}}\n")
    done = await run("ask", "hi", "--config", str(config))
    assert f"127.0.0.1:{port}" in done.stderr


def test_help_loads_neither_the_http_stack_nor_numbers() -> None:
    code = "import sys, router.cli; print([m for m in ('aiohttp', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_told() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert "0.1.0" in done.stdout
