"""Failover is invisible before the first content byte, and never happens after it."""

import asyncio
import json

import pytest
from fake_targets import EASY, HARD, OpenDoor, open_door
from fake_upstream import (
    DONE,
    HELLO,
    ROLE,
    STOP,
    Answer,
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

GOOD_STREAM = sse(ROLE, HELLO, STOP, DONE)

FAILURES = {
    "disconnect": (hang_up, "upstream_error"),
    "garbage": (garbage, "upstream_error"),
    "status 500": (reply(error("secret boom"), 500), "upstream_error"),
    "rate limit": (reply(error("slow"), 429), "rate_limited"),
    "full queue": (reply(error("full", "queue_full"), 503), "queue_full"),
    "redirect": (reply(b"", 302, Location="/x"), "upstream_error"),
    "our key refused": (reply(error("bad key"), 401), "upstream_error"),
    "context overflow": (reply(error("long", "context_length_exceeded"), 400), "invalid"),
    "too many choices": (reply(error("at most 4", "too_many_choices", "n"), 400), "invalid"),
}
STREAM_FAILURES = {
    **FAILURES,
    "end before content": (sse(ROLE), "upstream_error"),
    "cut before content": (sse(ROLE, end=False), "upstream_error"),
    "error frame before content": (sse(ROLE, event(error("boom"))), "upstream_error"),
    "malformed event": (sse(ROLE, event("{")), "upstream_error"),
}


@pytest.mark.parametrize(("answer", "outcome"), FAILURES.values(), ids=FAILURES)
async def test_a_failed_target_is_replaced_unseen(answer: Answer, outcome: str) -> None:
    async with (
        fake_upstream(answer) as edge,
        fake_upstream(reply(completion("ok"))) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
    ):
        async with door.ask() as response:
            assert response.status == 200
            assert await response.json() == completion("ok")
        assert_answered_by_cloud_after_edge(door, response.headers, outcome)
        assert cloud.requests[0][2]["model"] == "model-of-cloud"


@pytest.mark.parametrize(("answer", "outcome"), STREAM_FAILURES.values(), ids=STREAM_FAILURES)
async def test_a_failed_stream_is_replaced_unseen_before_content(
    answer: Answer, outcome: str
) -> None:
    async with (
        fake_upstream(answer) as edge,
        fake_upstream(GOOD_STREAM) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
    ):
        async with door.ask(stream=True) as response:
            assert response.status == 200
            assert await response.read() == ROLE + HELLO + STOP + DONE
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert_answered_by_cloud_after_edge(door, response.headers, outcome)


def assert_answered_by_cloud_after_edge(door: OpenDoor, headers: object, outcome: str) -> None:
    assert headers["x-tidegate-tier"] == headers["x-tidegate-target"] == "cloud"  # type: ignore[index]
    assert headers["x-tidegate-failover"] == f"edge:{outcome}"  # type: ignore[index]
    line = f'tidegate_failovers_total{{from_target="edge",outcome="{outcome}"}}'
    assert door.metric(line) == 1
    line = 'tidegate_requests_total{outcome="ok",route="chat",target="cloud",tier="cloud"}'
    assert door.metric(line) == 1


async def test_a_refused_connection_fails_over() -> None:
    async with (
        fake_upstream(GOOD_STREAM) as cloud,
        open_door(edge="http://127.0.0.1:9/v1", cloud=cloud) as door,
        door.ask(stream=True) as response,
    ):
        assert await response.read() == ROLE + HELLO + STOP + DONE


@pytest.mark.parametrize(
    "rest", [(), (event(error("boom")),), (DONE,), (event("{"),)], ids=["end", "error", "done", "{"]
)
async def test_a_failure_after_content_is_told_in_the_stream(rest: tuple[bytes, ...]) -> None:
    async with (
        fake_upstream(sse(ROLE, HELLO, 0.05, *rest)) as edge,
        fake_upstream(GOOD_STREAM) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
    ):
        async with door.ask(stream=True) as response:
            assert response.status == 200
            body = await response.read()
        assert cloud.requests == []
        assert body.startswith(ROLE + HELLO)
        last = body.removeprefix(ROLE + HELLO)
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_error"
        assert b"[DONE]" not in body
        assert b"boom" not in body
        line = (
            'tidegate_requests_total{outcome="upstream_error",route="chat",'
            'target="edge",tier="edge"}'
        )
        assert door.metric(line) == 1


async def test_the_clients_own_mistake_is_passed_on_and_not_tried_elsewhere() -> None:
    wrong = reply(error("top_p is odd", "odd", "top_p"), 400)
    async with (
        fake_upstream(wrong) as edge,
        fake_upstream(GOOD_STREAM) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
        door.ask(stream=True) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"] == {
            "message": "top_p is odd", "type": "invalid_request_error", "code": "odd",
            "param": "top_p",
        }  # fmt: skip
        assert response.headers["x-tidegate-target"] == "edge"
        assert cloud.requests == []


@pytest.mark.parametrize("stream", [True, False])
async def test_when_all_fail_the_first_cause_is_told_with_its_true_status(stream: bool) -> None:
    async with (
        fake_upstream(reply(error("slow"), 429, Retry_After="9")) as edge,
        fake_upstream(reply(error("secret"), 500)) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
        door.ask(stream=stream) as response,
    ):
        assert response.status == 503
        assert response.headers["Retry-After"] == "9"
        assert response.headers["x-tidegate-target"] == "edge"
        assert response.headers["x-tidegate-failover"] == "edge:rate_limited"
        body = await response.json()
        assert body["error"]["code"] == "rate_limited"
        assert "secret" not in json.dumps(body)


async def test_a_failure_that_may_pass_hides_an_overflow_elsewhere() -> None:
    async with (
        fake_upstream(reply(error("too long", "context_length_exceeded"), 400)) as edge,
        fake_upstream(hang_up) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
        door.ask() as response,
    ):
        assert response.status == 502
        assert response.headers["x-tidegate-target"] == "cloud"


async def test_an_overflow_everywhere_is_a_400() -> None:
    long = reply(error("5000 tokens do not fit 4096", "context_length_exceeded"), 400)
    async with (
        fake_upstream(long) as edge,
        fake_upstream(long) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
        door.ask() as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False])
async def test_targets_learn_how_urgent_a_request_is_and_how_much_time_is_left(
    stream: bool,
) -> None:
    headers = {"x-tidegate-class": "batch", "x-tidegate-deadline-ms": "60000", "x-other": "1"}
    answer = GOOD_STREAM if stream else reply(completion())
    async with (
        fake_upstream(sse(0.1, end=False)) as edge,
        fake_upstream(answer) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
        door.ask(headers=headers, stream=stream) as response,
    ):
        assert response.status == 200
        await response.read()
        first, second = edge.requests[0][1], cloud.requests[0][1]
        assert first["x-tidegate-class"] == second["x-tidegate-class"] == "batch"
        assert "x-other" not in first
        left = [int(each["x-tidegate-deadline-ms"]) for each in (first, second)]
        assert 50_000 < left[1] <= left[0] - 100 < 60_000


async def test_targets_of_an_ordinary_request_get_no_headers_about_it() -> None:
    async with (
        fake_upstream(reply(completion())) as edge,
        open_door(edge=edge) as door,
        door.ask() as response,
    ):
        assert response.status == 200
        assert not [name for name in edge.requests[0][1] if name.startswith("x-tidegate")]


@pytest.mark.parametrize(
    ("name", "value"), [("x-tidegate-class", "urgent"), ("x-tidegate-deadline-ms", "-1")]
)
async def test_a_wrong_header_is_refused_by_name(name: str, value: str) -> None:
    async with (
        fake_upstream(reply(completion())) as edge,
        open_door(edge=edge) as door,
        door.ask(headers={name: value}) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["param"] == name
        assert edge.requests == []


async def test_after_the_deadline_no_other_target_is_asked() -> None:
    async with (
        fake_upstream(sse(0.2, end=False)) as edge,
        fake_upstream(GOOD_STREAM) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
        door.ask(headers={"x-tidegate-deadline-ms": "100"}, stream=True) as response,
    ):
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "deadline"
        assert cloud.requests == []
        assert 'outcome="deadline"' in door.metrics.render().decode()


async def test_a_target_that_finds_the_deadline_passed_is_not_replaced() -> None:
    async with (
        fake_upstream(reply(error("The deadline has passed.", "deadline"), 504)) as edge,
        fake_upstream(reply(completion())) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
        door.ask() as response,
    ):
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "deadline"
        assert cloud.requests == []


async def test_a_pinned_tier_is_never_left() -> None:
    async with (
        fake_upstream(hang_up) as edge,
        fake_upstream(reply(completion())) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
        door.ask(HARD, model="edge") as response,
    ):
        assert response.status == 502
        assert response.headers["x-tidegate-rule"] == "model:edge"
        assert cloud.requests == []


async def test_two_targets_of_a_pinned_tier_stand_in_for_each_other() -> None:
    async with (
        fake_upstream(hang_up) as first,
        fake_upstream(reply(completion())) as second,
        open_door(edge=first, edge2=second) as door,
        door.ask(model="edge") as response,
    ):
        assert response.status == 200
        assert response.headers["x-tidegate-target"] == "edge2"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "answer", [stay_silent, sse(ROLE, 30.0), sse(ROLE, HELLO, 30.0)], ids=["silent", "role", "text"]
)
async def test_a_client_that_hangs_up_cancels_the_upstream(answer: Answer, stream: bool) -> None:
    async with (
        fake_upstream(answer) as edge,
        fake_upstream(stay_silent) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
    ):
        asking = asyncio.create_task(ask_and_read(door, stream))
        await asyncio.wait_for(edge.asked.wait(), 5)
        await asyncio.sleep(0.1)  # so that the answer has come as far as it will
        asking.cancel()
        await asyncio.wait_for(edge.hung_up.wait(), 1)
        await asyncio.wait_for(door.door.in_flight.wait_idle(), 1)
        assert cloud.requests == []
        line = (
            'tidegate_requests_total{outcome="client_closed",route="chat",'
            'target="edge",tier="edge"}'
        )
        assert door.metric(line) == 1
        assert door.metric("tidegate_in_flight") == 0


async def test_a_client_that_leaves_at_done_has_its_whole_answer_and_counts_as_ok() -> None:
    """OpenAI's clients close a stream as soon as they have read `[DONE]`."""
    # The upstream ends its stream a little after the event, as servers do.
    async with (
        fake_upstream(sse(ROLE, HELLO, STOP, DONE, 0.02)) as edge,
        open_door(edge=edge) as door,
    ):
        for _ in range(5):
            async with door.ask(stream=True) as response:
                received = b""
                while not received.endswith(DONE):
                    received += await response.content.readany()
                response.close()
            await asyncio.wait_for(door.door.in_flight.wait_idle(), 1)
        line = 'tidegate_requests_total{outcome="ok",route="chat",target="edge",tier="edge"}'
        assert door.metric(line) == 5


async def ask_and_read(door: OpenDoor, stream: bool) -> None:
    async with door.ask(stream=stream) as response:
        await response.read()


async def test_the_total_timeout_ends_a_request_before_and_after_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.api.door.TOTAL_SECONDS", 0.3)
    async with (
        fake_upstream(sse(ROLE, 30.0), sse(ROLE, HELLO, 30.0)) as edge,
        fake_upstream(GOOD_STREAM) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
    ):
        async with door.ask(stream=True) as response:
            assert response.status == 504
            assert (await response.json())["error"]["code"] == "timeout_total"
        async with door.ask(stream=True) as response:
            assert response.status == 200
            body = await response.read()
        assert body.startswith(ROLE + HELLO)
        assert b"timeout_total" in body
        assert b"[DONE]" not in body
        assert cloud.requests == []


async def test_content_is_sent_on_as_it_comes() -> None:
    async with (
        fake_upstream(sse(ROLE, HELLO, 30.0)) as edge,
        open_door(edge=edge) as door,
        door.ask(model="edge", stream=True) as response,
    ):
        assert await asyncio.wait_for(response.content.readany(), 5) == ROLE + HELLO


async def test_one_request_with_every_field_reaches_the_target_as_the_client_wrote_it() -> None:
    async with (
        fake_upstream(reply(completion())) as edge,
        open_door(edge=edge) as door,
        door.ask("问", model="edge", temperature=0, stop=["x"], user="u", seed=1) as response,
    ):
        assert response.status == 200
        assert edge.requests[0][2] == {
            "model": "model-of-edge", "messages": [{"role": "user", "content": "问"}],
            "temperature": 0, "stop": ["x"], "user": "u", "seed": 1,
        }  # fmt: skip


async def test_easy_goes_to_the_edge_and_hard_to_the_cloud_with_the_reason_in_headers() -> None:
    async with (
        fake_upstream(reply(completion())) as edge,
        fake_upstream(reply(completion())) as cloud,
        open_door(edge=edge, cloud=cloud) as door,
    ):
        found = {}
        for text in (EASY, HARD):
            async with door.ask(text) as response:
                headers = response.headers
                found[text] = (headers["x-tidegate-tier"], headers["x-tidegate-rule"])
                assert 0 <= float(headers["x-tidegate-complexity"]) <= 1
                assert len(headers["x-tidegate-decision"]) == 16
    assert found == {EASY: ("edge", "easy"), HARD: ("cloud", "hard")}
