"""What the router and every client may rely on, whichever engine answers."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest
from engine_kinds import CONTEXT, Kind
from engine_process import EngineProcess, engine_process
from parameter_values import CHAT_VALUES, COMPLETION_VALUES, NEEDED

from engine_core.parameters import CHAT, COMPLETION, EXTRAS, Parameter

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
        # The fake engine follows no grammar, and the built-in model knows no tools.
        "capabilities": ["logit_bias", "logprobs", "n", "tools"]
        if kind.is_fake
        else ["json", "logit_bias", "logprobs", "n"],
    }


def test_stats_have_every_field_and_count_requests(
    engine: EngineProcess, client: openai.OpenAI, kind: Kind
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
    if not kind.is_fake:
        assert sum(after["memory"].values()) == pytest.approx(after["rss_bytes"], rel=0.05)


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
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    # The second time, more of the prompt may be cached.
    assert chunks[-1].usage.to_dict() | {"prompt_tokens_details": None} == (
        whole.usage.to_dict() | {"prompt_tokens_details": None}
    )
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
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"temperature": 3}, "temperature"),
        ({"n": 17}, "n"),
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


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        *(("/v1/chat/completions", parameter) for parameter in (*CHAT, *EXTRAS)),
        *(("/v1/completions", parameter) for parameter in (*COMPLETION, *EXTRAS)),
    ],
    ids=lambda value: value.name if isinstance(value, Parameter) else value,
)
def test_every_parameter_is_treated_as_the_reference_says(
    engine: EngineProcess, path: str, parameter: Parameter
) -> None:
    chat = path == "/v1/chat/completions"
    plain = {"messages": user("Is it sunny?")} if chat else {"prompt": "It is"}
    values = CHAT_VALUES if chat else COMPLETION_VALUES
    body = {"model": "m", "max_tokens": 4, "temperature": 0, **plain, **values[parameter.name]}
    refused = parameter.fate == "refused"
    if (need := NEEDED.get(parameter.name)) is not None:
        refused = need not in engine.http.get("/engine/health").json()["capabilities"]
    response = engine.http.post(path, json=body)
    assert response.status_code == (400 if refused else 200), response.text
    if refused:
        error = response.json()["error"]
        assert error["code"] == "unsupported_parameter"
        assert error["param"].partition(".")[0] in (parameter.name, "tools")
    if parameter.fate == "ignored":
        del body[next(iter(values[parameter.name]))]
        without = engine.http.post(path, json={"model": "m", **body})
        assert without.json()["choices"] == response.json()["choices"]


def test_choices_are_those_of_the_seeds_one_after_the_other(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "m", "prompt": "Once upon a time", "max_tokens": 12}
    together = client.completions.create(n=3, seed=11, temperature=1, **options)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    alone = [
        client.completions.create(seed=11 + number, temperature=1, **options) for number in range(3)
    ]
    assert [choice.text for choice in together.choices] == [a.choices[0].text for a in alone]
    assert together.usage is not None
    usages = [answer.usage for answer in alone if answer.usage is not None]
    assert together.usage.prompt_tokens == usages[0].prompt_tokens
    assert together.usage.completion_tokens == sum(usage.completion_tokens for usage in usages)
    texts = ["", "", ""]
    for chunk in client.completions.create(n=3, seed=11, temperature=1, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in together.choices]


def test_log_probabilities_spell_the_answer(client: openai.OpenAI, kind: Kind) -> None:
    options: dict[str, Any] = {"model": "m", "messages": user(f"{CHINESE} 🌍"), "max_tokens": 24}
    whole = client.chat.completions.create(
        logprobs=True, top_logprobs=3, temperature=0, **options
    ).choices[0]
    assert whole.logprobs is not None
    tokens = whole.logprobs.content or []
    spelled = b"".join(bytes(token.bytes or ()) for token in tokens).decode(errors="ignore")
    # A detokeniser may leave out a space at the very beginning.
    assert spelled.strip() == (whole.message.content or "").strip()
    for token in tokens:
        assert token.logprob <= 0
        if not kind.is_fake:
            assert len(token.top_logprobs) == 3
            assert token.top_logprobs[0].logprob == max(t.logprob for t in token.top_logprobs)
            assert token.top_logprobs[0].bytes == token.bytes  # the likeliest one, at 0 degrees
    chunks = client.chat.completions.create(
        logprobs=True, top_logprobs=3, temperature=0, stream=True, **options
    )
    streamed = [
        token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    assert [token.bytes for token in streamed] == [token.bytes for token in tokens]


def test_log_probabilities_of_a_completion_point_into_its_text(client: openai.OpenAI) -> None:
    choice = client.completions.create(
        model="m", prompt="One, two, three,", logprobs=2, max_tokens=10, temperature=0
    ).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == choice.text
    for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[at:].startswith(token)


def test_answers_in_json_fit_their_schema(client: openai.OpenAI, kind: Kind) -> None:
    if kind.is_fake:
        pytest.skip("the fake engine follows no grammar")
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "people": {"type": "integer", "minimum": 0, "maximum": 99999999},
            "rivers": {
                "type": "array",
                "items": {"enum": ["Seine", "Rhine"]},
                "minItems": 1,
                "maxItems": 2,
            },
        },
        "required": ["city", "people", "rivers"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="m",
        messages=user("Tell me about a city."),
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": schema, "strict": True},
        },
        n=4,
        temperature=1,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), schema)


def test_a_schema_that_makes_no_sense_is_refused(engine: EngineProcess) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "banana"}}}
    response = post(engine, messages=user("Hi"), response_format=wrong)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("response_format")


def test_a_deadline_that_has_passed_ends_the_request(engine: EngineProcess, kind: Kind) -> None:
    if kind.is_fake:
        pytest.skip("the fake engine knows no deadlines")
    headers = {"x-tidegate-deadline-ms": "150", "x-tidegate-class": "batch"}
    response = engine.http.post("/v1/completions", json=LONG, headers=headers)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline"
    headers = {"x-tidegate-deadline-ms": "60000", "x-tidegate-class": "critical"}
    short = LONG | {"max_tokens": 2}
    assert engine.http.post("/v1/completions", json=short, headers=headers).status_code == 200


def test_pressure_says_what_it_gave_back(engine: EngineProcess) -> None:
    for level in (0, 4):
        answer = engine.http.post("/engine/pressure", json={"level": level}).json()
        assert answer["before"] > 0
        assert answer["after"] > 0
    assert engine.http.post("/engine/pressure", json={"level": 9}).status_code == 400
    assert ask(engine, 1)


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
        pytest.skip("the fake engine is done too soon")
    busy = [threading.Thread(target=hang_up, args=(engine, LONG, 4.0)) for _ in range(16)]
    for thread in busy:
        thread.start()
    _until(lambda: (now := engine.stats())["running"] + now["waiting"] == len(busy))
    details = engine.stats()["details"]
    places = details["slots"] if "slots" in details else details["running_limit"]
    _until(lambda: engine.stats()["running"] == places)
    before = engine.stats()
    assert before["waiting"], "nothing has to wait"
    hang_up(engine, LONG)
    _until(lambda: engine.stats()["cancelled_total"] == before["cancelled_total"] + 1)
    after = engine.stats()
    assert (after["running"], after["waiting"]) == (before["running"], before["waiting"])
    for thread in busy:
        thread.join()


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
