"""The client turns whatever an upstream does into a checked answer or one classified failure."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fake_upstream import (
    DONE,
    HELLO,
    ROLE,
    STOP,
    Answer,
    FakeUpstream,
    chunk,
    completion,
    error,
    event,
    fake_upstream,
    garbage,
    hang_up,
    reply,
    sse,
    stay_silent,
)

from router.guard.outcomes import Outcome, UpstreamFailure
from router.targets.client import MAX_LIFECYCLE_BYTES, UpstreamClient

PATH = "/chat/completions"
BODY = b'{"model":"m"}'
KEY = "sk-very-secret"
DEEP = '{"error":' + "[" * 50_000 + "]" * 50_000 + "}"


async def fetch(upstream: FakeUpstream, choices: int = 1, key: str | None = None) -> bytes:
    async with UpstreamClient(upstream.url, key=key) as client:
        return await client.fetch(PATH, BODY, choices)


async def pieces(upstream: FakeUpstream, choices: int = 1) -> AsyncIterator[bytes]:
    async with (
        UpstreamClient(upstream.url) as client,
        aclosing(client.stream(PATH, BODY, choices)) as stream,
    ):
        async for piece in stream:
            yield piece


async def read(upstream: FakeUpstream, choices: int = 1) -> tuple[list[bytes], Any]:
    """Return the pieces that came and the failure that followed, if any."""
    got: list[bytes] = []
    try:
        async for piece in pieces(upstream, choices):
            got.append(piece)  # noqa: PERF401 - what came before a failure counts
    except UpstreamFailure as failure:
        return got, failure
    return got, None


async def test_an_answer_comes_through_byte_for_byte() -> None:
    body = (
        b'{"choices": [{"index":0, "finish_reason":"stop", "message":{"content":"\xe4\xbd\xa0"}}]}'
    )
    async with fake_upstream(reply(body)) as upstream:
        assert await fetch(upstream) == body


@pytest.mark.parametrize(
    ("answer", "outcome", "status"),
    [
        (hang_up, Outcome.UPSTREAM_ERROR, 502),
        (garbage, Outcome.UPSTREAM_ERROR, 502),
        (reply({"x": 1}, 500), Outcome.UPSTREAM_ERROR, 502),
        (reply(b"<html>busy</html>", 502), Outcome.UPSTREAM_ERROR, 502),
        (reply(error("slow down"), 429), Outcome.RATE_LIMITED, 503),
        (reply(error("no room", "queue_full"), 503), Outcome.QUEUE_FULL, 503),
        (reply(error("no room", "memory_pressure"), 503), Outcome.MEM_REJECT, 503),
        (reply(error("loading"), 503), Outcome.UPSTREAM_ERROR, 503),
        (reply(error("bad key"), 401), Outcome.UPSTREAM_ERROR, 502),
        (reply(error("no model", "model_not_found"), 404), Outcome.UPSTREAM_ERROR, 502),
        (reply(b"", 307, Location="http://10.0.0.1/"), Outcome.UPSTREAM_ERROR, 502),
        (reply(error("wrong", "bad", "top_p"), 400), Outcome.INVALID, 400),
        (reply(error("Network connection lost")), Outcome.UPSTREAM_ERROR, 502),
        (reply(b"not json"), Outcome.UPSTREAM_ERROR, 502),
        (reply({"choices": []}), Outcome.UPSTREAM_ERROR, 502),
        (
            reply({"choices": [{"index": 0, "message": {}, "finish_reason": None}]}),
            Outcome.UPSTREAM_ERROR,
            502,
        ),
        (
            reply({"choices": [{"index": 0, "message": None, "finish_reason": "stop"}]}),
            Outcome.UPSTREAM_ERROR,
            502,
        ),
        (reply(DEEP.encode()), Outcome.UPSTREAM_ERROR, 502),
        (reply(DEEP.encode(), 500), Outcome.UPSTREAM_ERROR, 502),
        (reply(b"\x1f\x8b", Content_Encoding="gzip"), Outcome.UPSTREAM_ERROR, 502),
    ],
)
async def test_a_bad_answer_is_a_classified_failure(
    answer: Answer, outcome: Outcome, status: int
) -> None:
    async with fake_upstream(answer) as upstream:
        with pytest.raises(UpstreamFailure) as caught:
            await fetch(upstream)
        assert (caught.value.outcome, caught.value.status) == (outcome, status)
        assert len(upstream.requests) == 1


async def test_a_failure_before_content_is_the_same_for_a_stream() -> None:
    async with fake_upstream(reply(error("slow down"), 429, Retry_After="7")) as upstream:
        got, failure = await read(upstream)
    assert got == []
    assert failure.outcome is Outcome.RATE_LIMITED
    assert failure.retry_after == 7


@pytest.mark.parametrize("wait", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "9" * 5000, ""])
async def test_a_retry_after_that_is_no_wait_of_this_day_is_ignored(wait: str) -> None:
    async with fake_upstream(reply(error("slow down"), 429, Retry_After=wait)) as upstream:
        failure = (await read(upstream))[1]
    assert failure.outcome is Outcome.RATE_LIMITED
    assert failure.retry_after is None


async def test_a_refused_connection_is_an_upstream_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with UpstreamClient(f"http://127.0.0.1:{closed.getsockname()[1]}/v1") as client:
            with pytest.raises(UpstreamFailure) as caught:
                await client.fetch(PATH, BODY, 1)
    assert caught.value.outcome is Outcome.UPSTREAM_ERROR
    assert caught.value.may_fail_over


async def test_a_server_that_does_not_accept_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.targets.client.CONNECT_SECONDS", 0.2)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(full.getsockname())
            async with UpstreamClient(f"http://127.0.0.1:{full.getsockname()[1]}/v1") as client:
                with pytest.raises(UpstreamFailure) as caught:
                    await client.fetch(PATH, BODY, 1)
    assert caught.value.outcome is Outcome.TIMEOUT_CONNECT


async def test_only_the_key_and_our_own_headers_go_upstream() -> None:
    async with fake_upstream(reply(completion())) as upstream:
        await fetch(upstream, key=KEY)
    line, headers, body = upstream.requests[0]
    assert line == "POST /v1/chat/completions HTTP/1.1"
    assert headers["authorization"] == f"Bearer {KEY}"
    assert set(headers) == {
        "host", "user-agent", "accept", "accept-encoding", "authorization", "content-type",
        "content-length",
    }  # fmt: skip
    assert body == {"model": "m"}


async def test_an_upstreams_sentence_never_repeats_the_key() -> None:
    answer = reply(error(f"Bad parameter, your key {KEY} is fine", "bad", "n"), 400)
    async with fake_upstream(answer) as upstream:
        with pytest.raises(UpstreamFailure) as caught:
            await fetch(upstream, key=KEY)
    assert KEY not in caught.value.message
    assert "Bad parameter" in caught.value.message
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("param", "told"),
    [
        ("messages[0].content[1]", True),
        ("messages[12].tool_calls[0].function.arguments", True),
        ("stop[0][1]", True),
        ("a[-1]", False),
        ("a[0]b", False),
        ("[0]", False),
        ("sk-123", False),
        ("a[0] is wrong", False),
    ],
)
async def test_the_place_of_a_mistake_is_passed_on_if_it_is_one(param: str, told: bool) -> None:
    async with fake_upstream(reply(error("wrong", "bad", param), 400)) as upstream:
        with pytest.raises(UpstreamFailure) as caught:
            await fetch(upstream)
    assert caught.value.param == (param if told else None)


async def test_a_context_overflow_may_be_tried_elsewhere_other_mistakes_may_not() -> None:
    overflow = reply(error("too long", "context_length_exceeded"), 400)
    async with fake_upstream(overflow, reply(error("wrong"), 400)) as upstream:
        found = []
        for _ in range(2):
            with pytest.raises(UpstreamFailure) as caught:
                await fetch(upstream)
            found.append((caught.value.outcome, caught.value.may_fail_over))
    assert found == [(Outcome.INVALID, True), (Outcome.INVALID, False)]


async def test_connections_are_used_again() -> None:
    async with (
        fake_upstream(reply(completion()), sse(ROLE, HELLO, STOP, DONE)) as upstream,
        UpstreamClient(upstream.url) as client,
    ):
        await client.fetch(PATH, BODY, 1)
        for _ in range(2):
            assert [piece async for piece in client.stream(PATH, BODY, 1)]
    assert upstream.connections == 1


async def test_a_kept_connection_that_died_is_replaced_once() -> None:
    async with (
        fake_upstream(reply(completion()), hang_up, reply(completion())) as upstream,
        UpstreamClient(upstream.url) as client,
    ):
        await client.fetch(PATH, BODY, 1)
        assert await client.fetch(PATH, BODY, 1)
    assert upstream.connections == 2


async def test_a_unix_socket_is_a_target_too(tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    async with (
        fake_upstream(reply(completion()), socket=path) as upstream,
        UpstreamClient("http://engine/v1", socket=path) as client,
    ):
        assert await client.fetch(PATH, BODY, 1)
    assert upstream.requests[0][0] == "POST /v1/chat/completions HTTP/1.1"


async def test_nothing_is_given_before_the_first_content() -> None:
    async with fake_upstream(
        sse(b": ping\n\n", ROLE, 0.05, chunk({}), 0.05, HELLO, 0.05, STOP, DONE)
    ) as upstream:
        got, failure = await read(upstream)
    assert failure is None
    assert got[0] == ROLE + chunk({}) + HELLO
    assert b"".join(got) == ROLE + chunk({}) + HELLO + STOP + DONE


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"refusal": "no"},
    ],
)
async def test_content_reasoning_and_tools_commit(delta: dict[str, Any]) -> None:
    async with fake_upstream(sse(ROLE, chunk(delta), 0.05, event(error("boom")))) as upstream:
        got, failure = await read(upstream)
    assert got == [ROLE + chunk(delta)]
    assert failure.outcome is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize(
    "bad",
    [
        event(error("boom")),
        event({"error": "boom"}),
        b"event: error\ndata: boom\n\n",
        event("{broken"),
        event("[1]"),
        DONE,
        event({"choices": [{"index": 0, "delta": 5}]}),
        event(DEEP),
    ],
)
async def test_a_bad_event_is_a_failure_before_content_and_after_it(bad: bytes) -> None:
    async with fake_upstream(sse(ROLE, bad), sse(ROLE, HELLO, 0.05, bad)) as upstream:
        assert (await read(upstream))[0] == []
        got, failure = await read(upstream)
    assert got == [ROLE + HELLO]
    assert failure.outcome is Outcome.UPSTREAM_ERROR
    assert "boom" not in failure.message


@pytest.mark.parametrize("end", [True, False])
async def test_an_end_without_a_finish_reason_is_a_failure(end: bool) -> None:
    async with fake_upstream(sse(ROLE, HELLO, 0.05, end=end), sse(ROLE, end=end)) as upstream:
        got, failure = await read(upstream)
        assert got == [ROLE + HELLO]
        assert failure.outcome is Outcome.UPSTREAM_ERROR
        got, failure = await read(upstream)
        assert got == []
        assert failure.may_fail_over


async def test_an_empty_finish_reason_is_none() -> None:
    unfinished = chunk({"content": "a"}, finish="")
    answer = {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": ""}]}
    async with fake_upstream(sse(ROLE, unfinished, 0.05), reply(answer)) as upstream:
        got, failure = await read(upstream)
        assert got == [ROLE + unfinished]
        assert failure.outcome is Outcome.UPSTREAM_ERROR
        with pytest.raises(UpstreamFailure):
            await fetch(upstream)


async def test_content_and_failure_in_one_packet_fail_over_unseen() -> None:
    async with fake_upstream(sse(ROLE + HELLO + event(error("boom")))) as upstream:
        got, failure = await read(upstream)
    assert got == []
    assert failure is not None


async def test_done_is_added_for_a_finished_stream_without_it() -> None:
    async with fake_upstream(sse(HELLO, STOP)) as upstream:
        got, failure = await read(upstream)
    assert failure is None
    assert b"".join(got) == HELLO + STOP + DONE


async def test_all_choices_must_finish() -> None:
    second = chunk({"content": "b"}, index=1)
    async with fake_upstream(
        sse(HELLO, second, STOP, DONE),
        sse(HELLO, second, STOP, chunk(finish="length", index=1), DONE),
    ) as upstream:
        assert (await read(upstream, choices=2))[1] is not None
        assert (await read(upstream, choices=2))[1] is None


async def test_usage_after_the_finish_passes_untouched() -> None:
    usage = event({"choices": [], "usage": {"total_tokens": 3}})
    async with fake_upstream(sse(HELLO, STOP, usage, DONE)) as upstream:
        got, _ = await read(upstream)
    assert b"".join(got) == HELLO + STOP + usage + DONE


async def test_a_stream_of_nothing_but_roles_is_given_up() -> None:
    count = MAX_LIFECYCLE_BYTES // len(ROLE) + 2
    async with fake_upstream(sse(*[ROLE] * count, 5.0)) as upstream:
        got, failure = await read(upstream)
    assert got == []
    assert failure.outcome is Outcome.UPSTREAM_ERROR


async def test_an_answer_that_is_no_stream_is_a_failure_that_says_so() -> None:
    async with fake_upstream(reply(completion()), reply(error("boom"))) as upstream:
        assert "stream" in (await read(upstream))[1].message
        assert (await read(upstream))[1].outcome is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize("answer", [stay_silent, sse(ROLE, 30.0), sse(HELLO, 30.0)])
async def test_cancelling_closes_the_upstream_connection_at_once(answer: Answer) -> None:
    async with fake_upstream(answer) as upstream:
        reading = asyncio.create_task(read(upstream))
        await asyncio.sleep(0.1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await asyncio.wait_for(upstream.hung_up.wait(), 1)
