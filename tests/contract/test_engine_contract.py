"""What the router and every client may rely on, whichever engine answers."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from engine_kinds import CONTEXT, Kind
from engine_process import EngineProcess, engine_process

LONG: dict[str, Any] = {
    "model": "m",
    "prompt": "a b c " * 80,
    "max_tokens": 500,
    "temperature": 0,
    # What was said becomes ever likelier to be said again, so that the answer never ends by itself.
    "frequency_penalty": -2,
}
CHINESE = "中国的首都是哪里？"  # noqa: RUF001 - a full-width question mark belongs there


@pytest.fixture
def client(engine: EngineProcess) -> openai.OpenAI:
    """Return the real OpenAI client, talking to the engine's socket."""
    return openai.OpenAI(
        base_url="http://engine/v1", api_key="none", http_client=engine.http, max_retries=0
    )


@pytest.fixture(autouse=True)
def nothing_left_over(engine: EngineProcess) -> Iterator[None]:
    """After each test the engine is idle again and its cache of keys and values empty."""
    yield
    engine.wait_until_idle(5)
    assert engine.stats()["kv_used_bytes"] == 0


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def post(engine: EngineProcess, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return engine.http.post(path, json={"model": "m"} | body)


def test_health_names_the_model_and_its_context_window(engine: EngineProcess, kind: Kind) -> None:
    health = engine.http.get("/engine/health").json()
    assert health == {
        "status": "ok",
        "model": "fake" if kind.is_fake else "smollm2-135m-instruct",
        "context_window": CONTEXT,
        "capabilities": [],
    }


def test_stats_have_every_field_and_count_requests(
    engine: EngineProcess, client: openai.OpenAI
) -> None:
    before = engine.stats()
    answer = client.completions.create(model="m", prompt="One, two,", max_tokens=5, temperature=0)
    after = engine.stats()
    assert answer.usage is not None
    tokens = answer.usage.completion_tokens
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == tokens
    assert after["requests_total"] - before["requests_total"] == 1
    assert after["tokens_per_second"] > 0
    assert after["rss_bytes"] > 10_000_000
    assert after["kv_total_bytes"] > 0
    assert after["uptime_seconds"] > before["uptime_seconds"]
    assert after["details"]


def test_models_lists_the_one_model(client: openai.OpenAI, engine: EngineProcess) -> None:
    (model,) = client.models.list().data
    assert model.id == engine.http.get("/engine/health").json()["model"]
    assert model.object == "model"


@pytest.mark.parametrize("text", ["What is the capital of France?", CHINESE, "🌍 means"])
def test_streamed_text_equals_whole_text_at_temperature_zero(
    client: openai.OpenAI, text: str
) -> None:
    options: dict[str, Any] = {"model": "m", "messages": user(text), "temperature": 0}
    whole = client.chat.completions.create(max_tokens=48, **options)
    chunks = list(
        client.chat.completions.create(
            max_tokens=48, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert streamed
    finish = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert finish == [whole.choices[0].finish_reason]
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_real_model_knows_the_capital_of_france(client: openai.OpenAI, kind: Kind) -> None:
    answer = client.chat.completions.create(
        model="m", messages=user("What is the capital of France?"), temperature=0, max_tokens=40
    )
    content = answer.choices[0].message.content or ""
    assert ("France" if kind.is_fake else "Paris") in content
    assert answer.choices[0].finish_reason == "stop"


def test_every_streamed_piece_is_whole_characters(client: openai.OpenAI) -> None:
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            model="m", messages=user(f"{CHINESE} 🌍🌎"), stream=True, temperature=0, max_tokens=60
        )
    ]
    assert not any("\ufffd" in piece for piece in pieces)


def test_same_seed_gives_the_same_text(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(
            model="m", prompt="Once upon a time", temperature=1.2, seed=seed, max_tokens=24
        )
        .choices[0]
        .text
        for seed in (7, 7)
    ]
    assert texts[0] == texts[1]


def test_other_seeds_give_other_texts(client: openai.OpenAI, kind: Kind) -> None:
    if kind.is_fake:
        pytest.skip("the fake engine draws nothing")
    texts = {
        client.completions.create(
            model="m", prompt="Once upon a time", temperature=1.2, seed=seed, max_tokens=24
        )
        .choices[0]
        .text
        for seed in (1, 2, 3)
    }
    assert len(texts) == 3


def test_max_tokens_ends_with_length_and_is_counted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=user("Tell me a long story."), max_completion_tokens=7
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_stop_string_ends_the_text_and_is_not_in_it(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "m",
        "messages": user("What is the capital of France?"),
        "temperature": 0,
        "max_tokens": 40,
    }
    full = client.chat.completions.create(**options).choices[0].message.content or ""
    stop = full[9:14]  # five characters, so across tokens
    cut = client.chat.completions.create(stop=["zzzz", stop], **options).choices[0]
    assert cut.message.content == full[: full.index(stop)]
    assert cut.finish_reason == "stop"
    streamed = client.chat.completions.create(stop=["zzzz", stop], stream=True, **options)
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed]
    assert "".join(pieces) == cut.message.content


def test_completions_stream_and_answer_whole(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "m", "prompt": "The sky is", "temperature": 0}
    whole = client.completions.create(max_tokens=12, **options)
    chunks = client.completions.create(max_tokens=12, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.object == "text_completion"


def test_token_ids_are_a_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=[72, 105, 33], max_tokens=3)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
        ({"colour": "red"}, "colour"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": "hello"}, "messages"),
    ],
)
def test_bad_requests_name_the_field(
    client: openai.OpenAI, engine: EngineProcess, body: dict[str, Any], param: str
) -> None:
    before = engine.stats()["requests_total"]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post(
            "/chat/completions",
            body={"model": "m", "messages": user("hi")} | body,
            cast_to=object,
        )
    assert refusal.value.param == param
    assert engine.stats()["requests_total"] == before


def test_bad_json_is_a_400_in_openais_shape(engine: EngineProcess) -> None:
    response = engine.http.post(
        "/v1/chat/completions", content=b"{oops", headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_prompt_longer_than_the_context_window_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="m", messages=user("word " * CONTEXT))
    assert refusal.value.code == "context_length_exceeded"


def test_answer_ends_where_the_context_window_ends(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="m", prompt=[65] * (CONTEXT - 4), max_tokens=100, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 4
    if answer.usage.completion_tokens == 4:
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_hang_up_frees_the_engine_within_a_second(engine: EngineProcess, stream: bool) -> None:
    before = engine.stats()
    hang_up(engine, LONG | {"stream": stream})
    assert engine.wait_until_idle(1.0) < 1.0
    after = engine.stats()
    assert after["cancelled_total"] - before["cancelled_total"] == 1
    assert after["generated_tokens_total"] - before["generated_tokens_total"] < 480


def test_hang_up_while_waiting_frees_the_place(engine: EngineProcess, kind: Kind) -> None:
    if kind.is_fake:
        pytest.skip("the fake engine runs several requests at once")
    busy = threading.Thread(target=hang_up, args=(engine, LONG, 1.5))
    busy.start()
    _until(lambda: engine.stats()["running"] == 1)
    hang_up(engine, LONG)
    _until(lambda: engine.stats()["waiting"] == 0)
    assert engine.stats()["running"] == 1
    busy.join()


def test_requests_at_the_same_time_all_get_their_own_answer(engine: EngineProcess) -> None:
    alone = [ask(engine, number) for number in range(4)]
    together: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=number: together.update({n: ask(engine, n)}))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(4)] == alone


def test_sigterm_ends_the_process_with_zero(kind: Kind) -> None:
    with engine_process(kind.module, *kind.options) as own:
        own.wait_until_ready()
        own.process.send_signal(signal.SIGTERM)
        assert own.wait(6) == 0
        assert "Traceback" not in own.log()


def test_end_of_the_lifeline_ends_the_process_while_it_generates(kind: Kind) -> None:
    with engine_process(kind.module, *kind.options) as own:
        own.wait_until_ready()
        with own.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            next(response.iter_lines())
            assert own.process.stdin is not None
            own.process.stdin.close()
            assert own.wait(6) == 0


def test_unknown_model_is_an_error_of_one_line(kind: Kind) -> None:
    if kind.is_fake:
        pytest.skip("the fake engine has no model to look for")
    with engine_process(kind.module, "--model", "./no/such/folder") as own:
        assert own.wait(60) == 2
        assert "Traceback" not in own.log()
        assert own.log().splitlines()[-1].startswith("error: ")


def ask(engine: EngineProcess, number: int) -> str:
    response = post(
        engine, "/v1/completions", prompt=f"Number {number} is", max_tokens=8, temperature=0
    )
    text: str = response.json()["choices"][0]["text"]
    return text


def hang_up(engine: EngineProcess, body: dict[str, Any], seconds: float = 0.3) -> None:
    """Send a completion on a connection of its own and break that off in the middle."""
    transport = httpx.HTTPTransport(uds=str(engine.uds))
    with httpx.Client(transport=transport, base_url="http://engine", timeout=30) as own:
        request = own.build_request("POST", "/v1/completions", content=json.dumps(body))
        request.headers["Content-Type"] = "application/json"
        if body.get("stream"):
            response = own.send(request, stream=True)
            next(response.iter_bytes())
            time.sleep(seconds)
            response.close()
            return
        request.extensions["timeout"]["read"] = seconds
        with pytest.raises(httpx.ReadTimeout):
            own.send(request)


def _until(condition: Any, seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
