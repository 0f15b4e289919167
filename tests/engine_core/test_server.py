"""The engine's HTTP surface over the fake engine, in process."""

import asyncio
import io
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.errors import ApiError
from engine_core.fake_engine import FakeEngine
from engine_core.requests import read_chat, read_completion
from engine_core.server import INLINE_BODY_BYTES, MAX_BODY_BYTES, PATHS, make_app
from engine_core.types import PRIORITIES, Event, GenerationRequest, TextEvent
from engine_core.urgency import Urgency

HI: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Hi you"}]}


HI_TEXT: dict[str, Any] = {"model": "any", "prompt": "Hi you"}


class Client:
    """Talks to one engine server."""

    def __init__(self, session: aiohttp.ClientSession, engine: FakeEngine) -> None:
        self.session = session
        self.engine = engine

    async def post(
        self, body: Any, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        async with self.session.post(path, data=io.BytesIO(data), headers=headers) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    async def stream(self, body: Any, path: str = "/v1/chat/completions") -> list[Any]:
        """Return the decoded events; `[DONE]` stays text."""
        async with self.session.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        *events, rest = text.split("\n\n")
        assert rest == ""
        datas = [event.removeprefix("data: ") for event in events]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


Serve = Callable[..., Awaitable[Client]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Return what serves a fake engine made with the given options."""
    cleanups: list[Callable[[], Awaitable[None]]] = []

    async def start(**options: Any) -> Client:
        engine = FakeEngine(**options)
        await engine.start()
        server = TestServer(make_app(engine))
        await server.start_server(auto_decompress=False)
        session = aiohttp.ClientSession(server.make_url("/"))
        cleanups.extend([server.close, session.close])
        return Client(session, engine)

    yield start
    for cleanup in reversed(cleanups):
        await cleanup()


async def test_chat_answers_in_openai_shape(serve: Serve) -> None:
    status, body = await (await serve()).post(HI)
    assert status == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi you", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 12,
            "completion_tokens": 7,
            "total_tokens": 19,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_chat_streams_role_then_text_then_finish_then_done(serve: Serve) -> None:
    *chunks, done = await (await serve()).stream(HI)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hi you"
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * 7 + ["stop"]


async def test_usage_chunk_comes_last_and_only_when_asked_for(serve: Serve) -> None:
    body = HI | {"stream_options": {"include_usage": True}}
    *chunks, last, done = await (await serve()).stream(body)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 19


async def test_completion_answers_in_openai_shape(serve: Serve) -> None:
    client = await serve()
    body = {"model": "m", "prompt": "a rose is a rose is a rose", "max_tokens": 6}
    status, answer = await client.post(body, "/v1/completions")
    assert status == 200
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "a rose", "logprobs": None, "finish_reason": "length"}
    ]
    *chunks, done = await client.stream(body, "/v1/completions")
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a rose"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_completion_has_openais_default_of_sixteen_tokens(serve: Serve) -> None:
    _, body = await (await serve()).post({"model": "m", "prompt": "x" * 99}, "/v1/completions")
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", [[104, 105], ["hi"], "hi"])
async def test_completion_takes_a_text_or_token_ids(serve: Serve, prompt: Any) -> None:
    _, body = await (await serve()).post({"model": "m", "prompt": prompt}, "/v1/completions")
    assert body["choices"][0]["text"] == "hi"


async def test_parts_of_a_message_are_joined_and_developer_is_system(serve: Serve) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    _, body = await (await serve()).post({"model": "m", "messages": messages})
    assert body["choices"][0]["message"]["content"] == "one two"
    assert body["usage"]["prompt_tokens"] == len("system: be\nuser: one two")


async def test_long_prompts_go_through_a_thread(serve: Serve) -> None:
    text = "long " * INLINE_BODY_BYTES
    client = await serve(context_window=50_000)
    _, body = await client.post(
        HI | {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    )
    assert body["choices"][0]["message"]["content"] == "long"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"257": 1.0}}, "logit_bias"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
        ({"logit_bias": {"٣": 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": 1.0, "05": 2.0}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"chat_template": "x"}, "chat_template"),
        ({"model": None}, "model"),
    ],
)
async def test_what_is_wrong_or_unsupported_is_a_400_that_names_the_field(
    serve: Serve, extra: dict[str, Any], param: str
) -> None:
    client = await serve()
    status, body = await client.post(HI | extra)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param
    assert client.engine.stats().requests_total == 0


async def test_an_error_does_not_repeat_what_the_client_wrote(serve: Serve) -> None:
    client = await serve()
    _, body = await client.post(HI | {"messages": [{"role": "open sesame", "content": ""}]})
    assert body["error"]["message"] == "Invalid 'messages[0].role': Invalid enum value."


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
    ],
)
async def test_what_is_wrong_in_a_completion_is_a_400_that_names_the_field(
    serve: Serve, extra: dict[str, Any], param: str
) -> None:
    body = {"model": "m", "prompt": "x"} | extra
    status, answer = await (await serve()).post(body, "/v1/completions")
    assert (status, answer["error"]["param"]) == (400, param)


async def test_fields_that_ask_for_nothing_are_ignored(serve: Serve) -> None:
    status, _ = await (await serve()).post(
        HI
        | {
            "user": "u",
            "metadata": {"a": "b"},
            "store": False,
            "n": 1,
            "tools": [],
            "tool_choice": "auto",
            "logprobs": False,
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "parallel_tool_calls": True,
        }
    )
    assert status == 200


async def test_choices_come_in_order_and_the_prompt_is_counted_once(serve: Serve) -> None:
    client = await serve()
    _, body = await client.post(HI | {"n": 3, "seed": 7})
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"Hi you"}
    assert body["usage"]["prompt_tokens"] == 12
    assert body["usage"]["completion_tokens"] == 3 * 7
    assert client.engine.stats().requests_total == 3
    _, body = await client.post({"model": "m", "prompt": "ab", "n": 2}, "/v1/completions")
    assert [choice["text"] for choice in body["choices"]] == ["ab", "ab"]


@pytest.mark.parametrize("chat", [True, False])
async def test_streamed_choices_carry_their_index_and_each_ends(serve: Serve, chat: bool) -> None:
    client = await serve(token_delay=0.001)
    body = HI if chat else {"model": "m", "prompt": "Hi you"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    *chunks, last, done = await client.stream(
        body | {"n": 2, "stream_options": {"include_usage": True}}, path
    )
    assert done == "[DONE]"
    assert last["usage"]["completion_tokens"] == 14
    texts = ["", ""]
    finished = [False, False]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert not finished[choice["index"]]
        texts[choice["index"]] += choice["delta"].get("content", "") if chat else choice["text"]
        finished[choice["index"]] = choice["finish_reason"] is not None
    assert texts == ["Hi you", "Hi you"]
    assert all(finished)


async def test_choices_that_find_no_place_are_refused_together(serve: Serve) -> None:
    client = await serve(slots=1, max_waiting=3, token_delay=0.01)
    long = HI | {"messages": [{"role": "user", "content": "x" * 4000}]}
    for stream in (False, True):
        busy = asyncio.create_task(client.post(long))
        await _until(lambda: client.engine.stats().running == 1)
        status, body = await client.post(HI | {"n": 4, "stream": stream})
        assert (status, body["error"]["code"]) == (503, "queue_full")
        await _until(lambda: client.engine.stats().waiting == 0)
        busy.cancel()
        await asyncio.wait({busy})
        await _until(lambda: client.engine.stats().running == 0)


async def test_more_choices_than_the_engine_can_ever_hold_are_a_400_with_the_most(
    serve: Serve,
) -> None:
    client = await serve(slots=1, max_waiting=3)
    for path, body in (("/v1/chat/completions", HI), ("/v1/completions", HI_TEXT)):
        status, answer = await client.post(body | {"n": 6}, path)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, "n", "too_many_choices")
        assert "'n' is at most 4 on this engine" in error["message"]
        status, answer = await client.post(body | {"n": 4}, path)
        assert (status, len(answer["choices"])) == (200, 4)
    assert client.engine.stats().requests_total == 8


async def test_hang_up_cancels_all_choices(serve: Serve) -> None:
    client = await serve(token_delay=0.005)
    content = {"messages": [{"role": "user", "content": "x" * 4000}]}
    for stream in (False, True):
        task = asyncio.create_task(client.post(HI | content | {"n": 3, "stream": stream}))
        await _until(lambda: client.engine.stats().running == 3)
        task.cancel()
        await asyncio.wait({task})
        await _until(lambda: client.engine.stats().running == 0)
    assert client.engine.stats().cancelled_total == 6


CALL = '<tool_call>{"name": "now", "arguments": {"zone": "é"}}</tool_call>'
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "now"}}]}


def says(text: str) -> dict[str, Any]:
    """Return a body to which the fake engine answers with this text."""
    return HI | {"messages": [{"role": "user", "content": text}]}


async def test_a_tool_call_is_told_as_one(serve: Serve) -> None:
    _, body = await (await serve()).post(says(f"Wait. {CALL}") | TOOLS)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Wait."
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "now", "arguments": '{"zone": "é"}'}


async def test_an_answer_of_calls_alone_has_no_content(serve: Serve) -> None:
    _, body = await (await serve()).post(says(CALL) | TOOLS)
    assert body["choices"][0]["message"]["content"] is None


async def test_streamed_calls_come_whole_and_no_tag_is_content(serve: Serve) -> None:
    *chunks, done = await (await serve()).stream(says(f"Wait. {CALL}{CALL} Yes") | TOOLS)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Wait.Yes"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert {call["function"]["arguments"] for call in calls} == {'{"zone": "é"}'}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_without_offered_tools_a_tag_is_text(serve: Serve) -> None:
    client = await serve()
    for extra in ({}, TOOLS | {"tool_choice": "none"}):
        _, body = await client.post(says(CALL) | extra)
        assert body["choices"][0]["message"] == {
            "role": "assistant",
            "content": CALL,
            "refusal": None,
        }
        assert body["choices"][0]["finish_reason"] == "stop"


async def test_the_result_of_a_call_goes_on_in_the_conversation(serve: Serve) -> None:
    client = await serve()
    _, body = await client.post(says(CALL) | TOOLS)
    message = body["choices"][0]["message"]
    result = {
        "role": "tool",
        "tool_call_id": message["tool_calls"][0]["id"],
        "content": "12:00",
    }
    messages = [*HI["messages"], message, result]
    status, body = await client.post(HI | TOOLS | {"messages": messages})
    assert status == 200
    assert "12:00" in body["choices"][0]["message"]["content"]


async def test_a_model_without_tools_says_so(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await serve()
    monkeypatch.setattr(client.engine.tokenizer, "tool_format", None)
    status, body = await client.post(HI | TOOLS)
    assert (status, body["error"]["param"]) == (400, "tools")
    assert "chat template of fake" in body["error"]["message"]
    async with client.session.get("/engine/health") as response:
        assert "tools" not in (await response.json())["capabilities"]


async def test_health_says_what_the_router_may_send(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await serve()
    async with client.session.get("/engine/health") as response:
        health = await response.json()
    assert health["capabilities"] == ["logit_bias", "logprobs", "n", "tools"]
    monkeypatch.setattr(client.engine.tokenizer, "follows_grammars", True)
    async with client.session.get("/engine/health") as response:
        assert "json" in (await response.json())["capabilities"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (TOOLS | {"tool_choice": "required"}, "tools"),
    ],
)
async def test_a_grammar_that_cannot_be_enforced_is_refused_before_anything_runs(
    serve: Serve, extra: dict[str, Any], param: str
) -> None:
    client = await serve()  # the fake engine follows no grammar
    status, body = await client.post(HI | extra)
    assert (status, body["error"]["param"]) == (400, param)
    assert client.engine.stats().requests_total == 0


async def test_grammars_that_take_long_hold_up_no_other_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await serve()
    compiled = threading.Event()
    monkeypatch.setattr(client.engine.tokenizer, "matcher", lambda _: compiled.wait(10))
    slow = [
        asyncio.create_task(client.post(HI | {"response_format": {"type": "json_object"}}))
        for _ in range(40)  # more than asyncio has threads
    ]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        # So long that another thread reads it.
        status, _ = await client.post(HI | {"user": "x" * INLINE_BODY_BYTES})
    assert status == 200
    assert not any(task.done() for task in slow)
    compiled.set()
    assert {status for status, _ in await asyncio.gather(*slow)} == {200}


async def test_log_probabilities_are_told_whole_and_streamed(serve: Serve) -> None:
    client = await serve()
    _, body = await client.post(HI | {"logprobs": True, "top_logprobs": 1})
    logprobs = body["choices"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs["content"]] == list("Hi you")
    assert logprobs["content"][0]["top_logprobs"] == [{"token": "H", "logprob": 0.0, "bytes": [72]}]
    *chunks, _ = await client.stream(HI | {"logprobs": True})
    streamed = [
        entry["token"]
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == list("Hi you")
    completion = {"model": "m", "prompt": "aéb", "logprobs": 0}
    _, body = await client.post(completion, "/v1/completions")
    whole = body["choices"][0]["logprobs"]
    assert whole["text_offset"] == [0, 1, 1, 2]
    *chunks, _ = await client.stream(completion, "/v1/completions")
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [at for each in told if each for at in each["text_offset"]] == [0, 1, 1, 2]


async def test_tokens_of_calls_are_told_too(serve: Serve) -> None:
    *chunks, _ = await (await serve()).stream(says(CALL) | TOOLS | {"logprobs": True})
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    tokens = [bytes(e["bytes"]) for each in told if each for e in each["content"]]
    assert b"".join(tokens).decode() == CALL


async def test_pressure_is_passed_to_the_engine(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await serve()
    levels: list[int] = []

    async def pressure(level: int) -> dict[str, int]:
        levels.append(level)
        return {"before": 2, "after": 1}

    monkeypatch.setattr(client.engine, "pressure", pressure)
    for level in range(5):
        status, body = await client.post({"level": level}, "/engine/pressure")
        assert (status, body) == (200, {"before": 2, "after": 1})
    assert levels == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "level"),
        ({"level": 5}, "level"),
        ({"level": -1}, "level"),
        ({"level": 1.5}, "level"),
        ({"level": True}, "level"),
        ({"level": "1"}, "level"),
        ({"level": 1, "force": True}, "force"),
        ([], None),
    ],
)
async def test_pressure_takes_one_level_and_nothing_else(
    serve: Serve, body: Any, param: str | None
) -> None:
    client = await serve()
    status, answer = await client.post(body, "/engine/pressure")
    assert (status, answer["error"]["param"]) == (400, param)
    assert (await client.post({"level": 1}, "/engine/pressure", Host="evil.example"))[0] == 403
    assert (await client.post({"level": 1}, "/engine/pressure", **{"Content-Type": "text/plain"}))[
        0
    ] == 415


async def test_headers_say_how_urgent_a_request_is(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await serve()
    asked = _note_requests(client.engine, monkeypatch)
    before = time.monotonic()
    headers = {"x-tidegate-class": "batch", "x-tidegate-deadline-ms": "60000"}
    assert (await client.post(HI | {"n": 2, "cache_salt": "s"}, **headers))[0] == 200
    assert [request.priority for request in asked] == [PRIORITIES["batch"]] * 2
    assert {request.cache_salt for request in asked} == {"s"}
    assert all(before + 60 <= r.deadline <= time.monotonic() + 60 for r in asked if r.deadline)
    status, body = await client.post(HI, **{"x-tidegate-class": "urgent"})
    assert (status, body["error"]["param"]) == (400, "x-tidegate-class")
    status, body = await client.post(HI, **{"x-tidegate-deadline-ms": "0"})
    assert (status, body["error"]["param"]) == (400, "x-tidegate-deadline-ms")


async def test_prompt_that_fills_the_context_window_is_a_400_with_both_numbers(
    serve: Serve,
) -> None:
    client = await serve(context_window=20)
    status, body = await client.post(HI | {"messages": [{"role": "user", "content": "x" * 14}]})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "20 tokens" in body["error"]["message"]
    assert (await client.post(HI | {"messages": [{"role": "user", "content": "x" * 13}]}))[0] == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a":NaN}'],
)
async def test_body_that_is_no_json_object_is_a_400(serve: Serve, body: bytes) -> None:
    status, answer = await (await serve()).post(body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_other_bodies_are_refused_by_their_headers(serve: Serve) -> None:
    client = await serve()
    assert (await client.post(HI, **{"Content-Type": "text/plain"}))[0] == 415
    assert (await client.post(HI, **{"Content-Encoding": "gzip"}))[0] == 415
    status, body = await client.post(b"x" * (MAX_BODY_BYTES + 1))
    assert (status, body["error"]["code"]) == (413, "body_too_large")


async def test_unknown_paths_and_methods_are_json_errors(serve: Serve) -> None:
    client = await serve()
    status, body = await client.post(HI, "/v1/embeddings")
    assert (status, body["error"]["code"]) == (404, "not_found")
    assert f"does not offer this path; it has {PATHS}." in body["error"]["message"]
    status, body = await client.post(HI, "/v1/models")
    assert (status, body["error"]["type"]) == (405, "invalid_request_error")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:1", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("localhost:port", 403),
        ("127.0.0.1/?x", 403),
        ("user@127.0.0.1", 403),
        ("[::1", 403),
    ],
)
async def test_foreign_host_is_refused_on_tcp(serve: Serve, host: str, status: int) -> None:
    assert (await (await serve()).post(HI, Host=host))[0] == status


async def test_failure_before_the_first_byte_has_its_true_status(serve: Serve) -> None:
    client = await serve(fail_after=0)
    for extra in ({}, {"stream": True}):
        status, body = await client.post(HI | extra)
        assert (status, body["error"]["code"]) == (500, "engine_error")


async def test_failure_after_the_first_byte_ends_the_stream_without_done(serve: Serve) -> None:
    *chunks, last = await (await serve(fail_after=3)).stream(HI)
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "Hi "
    assert set(last) == {"error"}
    assert last["error"]["code"] == "engine_error"


async def test_an_engine_that_ends_without_finishing_is_a_failure(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await serve()

    async def generate(_: GenerationRequest) -> AsyncGenerator[Event, None]:
        yield TextEvent("Hi")

    monkeypatch.setattr(client.engine, "generate", generate)
    status, body = await client.post(HI)
    assert (status, body["error"]["code"]) == (500, "engine_error")
    *_, last = await client.stream(HI)
    assert last["error"]["code"] == "engine_error"


async def test_full_engine_says_when_to_come_back(serve: Serve) -> None:
    client = await serve(slots=1, max_waiting=1, token_delay=10)
    busy = [asyncio.create_task(client.post(HI)) for _ in range(2)]
    await _until(lambda: client.engine.stats().waiting == 1)
    async with client.session.post("/v1/chat/completions", json=HI) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["code"] == "queue_full"
    for task in busy:
        task.cancel()
    await asyncio.wait(busy)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("delay", [0.005, 30])
async def test_hang_up_cancels_the_generation(serve: Serve, stream: bool, delay: float) -> None:
    client = await serve(token_delay=delay)
    body = HI | {"stream": stream, "messages": [{"role": "user", "content": "x" * 4000}]}
    task = asyncio.create_task(client.post(body))
    await _until(lambda: client.engine.stats().running == 1)
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.wait({task})
    await _until(lambda: client.engine.stats().running == 0)
    assert client.engine.stats().cancelled_total == 1


async def test_one_log_line_per_request_without_its_text(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tidegate.engine")
    client = await serve()
    secret = "open sesame"
    await client.post(HI | {"messages": [{"role": "user", "content": secret}]})
    (line,) = [record.getMessage() for record in caplog.records]
    assert "tokens_in=17 tokens_out=12" in line
    assert "finish=stop" in line
    assert secret not in line


async def test_own_mistakes_are_a_500_without_a_traceback(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await serve()
    monkeypatch.setattr(client.engine.tokenizer, "encode_chat", lambda *_: 1 / 0)
    status, body = await client.post(HI)
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "division" not in json.dumps(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
fields = st.sampled_from(
    [
        *("model", "messages", "prompt", "stop", "seed", "n", "max_tokens", "stream", "top_p"),
        *("tools", "tool_choice", "logit_bias", "logprobs", "top_logprobs", "response_format"),
        *("stream_options", "best_of", "cache_salt"),
    ]
)


@given(st.dictionaries(fields, json_values), st.sampled_from([read_chat, read_completion]))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_json_is_understood_or_refused(body: dict[str, Any], read: Callable[..., Any]) -> None:
    base = HI if read is read_chat else {"model": "m", "prompt": "x"}
    try:
        ask = read(json.dumps({**base, **body}).encode(), FakeEngine(), Urgency())
    except ApiError as error:
        assert error.status == 400  # noqa: PT017 - either outcome is right
    else:
        assert all(generation.prompt_ids for generation in ask.generations)


def _note_requests(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[GenerationRequest]:
    """Return a list that fills with the requests the engine gets."""
    asked: list[GenerationRequest] = []
    generate = engine.generate

    def note(request: GenerationRequest) -> AsyncGenerator[Event, None]:
        asked.append(request)
        return generate(request)

    monkeypatch.setattr(engine, "generate", note)
    return asked


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(1):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.002)
