"""Tools with the real weights, the real engine process and the real OpenAI client.

The built-in model has not learned tools, so its calls make little sense. That they are calls at all,
with arguments that fit, is what the engine is responsible for.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from engine_process import EngineProcess, engine_process
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tool_model import save_tool_model

from engine_core.models import ModelFiles

pytestmark = pytest.mark.slow

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"$ref": "#/$defs/Unit"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "description": "Tells the time."},
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def engine(
    builtin_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("tools")
    model = save_tool_model(builtin_files, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHE_DIRECTORY", str(folder / "cache"))
        with engine_process("edge_engine", "--model", str(model), "--context", "1024") as process:
            process.wait_until_ready(600)
            yield process


@pytest.fixture
def client(engine: EngineProcess) -> openai.OpenAI:
    return openai.OpenAI(
        base_url="http://engine/v1", api_key="none", http_client=engine.http, max_retries=0
    )


def test_a_tool_call_makes_its_round(client: openai.OpenAI, engine: EngineProcess) -> None:
    assert "tools" in engine.http.get("/engine/health").json()["capabilities"]
    options: dict[str, Any] = {"model": "m", "tools": [WEATHER, TIME], "temperature": 0}
    asked = client.chat.completions.create(
        messages=QUESTION,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        **options,
    ).choices[0]
    assert asked.finish_reason == "tool_calls"
    assert asked.message.content is None
    (call,) = asked.message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    answered = client.chat.completions.create(
        messages=[
            *QUESTION,
            asked.message,
            {"role": "tool", "tool_call_id": call.id, "content": "It is sunny, 21 degrees."},
        ],
        max_tokens=40,
        **options,
    ).choices[0]
    assert answered.message.content
    assert answered.finish_reason in ("stop", "length")


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_must_come_come_at_any_temperature(
    client: openai.OpenAI, parallel: bool
) -> None:
    answer = client.chat.completions.create(
        model="m",
        messages=QUESTION,
        tools=[WEATHER, TIME],
        tool_choice="required",
        parallel_tool_calls=parallel,
        temperature=1,
        seed=3,
        n=4,
    )
    for choice in answer.choices:
        assert choice.message.tool_calls
        assert parallel or len(choice.message.tool_calls) == 1
        for call in choice.message.tool_calls:
            assert isinstance(call, ChatCompletionMessageFunctionToolCall)
            arguments = json.loads(call.function.arguments)
            if call.function.name == "get_weather":
                jsonschema.validate(arguments, WEATHER["function"]["parameters"])
            else:
                assert arguments == {}


def test_a_streamed_call_is_the_same_call(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "m",
        "messages": QUESTION,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    (whole,) = client.chat.completions.create(**options).choices[0].message.tool_calls or []
    assert isinstance(whole, ChatCompletionMessageFunctionToolCall)
    with client.chat.completions.stream(**options) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.name == whole.function.name
    assert streamed.function.arguments == whole.function.arguments


def test_without_calls_the_text_is_as_without_a_splitter(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "m", "messages": QUESTION, "temperature": 0}
    plain = client.chat.completions.create(max_tokens=30, **options).choices[0].message
    none = client.chat.completions.create(
        max_tokens=30, tools=[WEATHER], tool_choice="none", **options
    ).choices[0]
    assert none.message.content == plain.content
    assert not none.message.tool_calls
