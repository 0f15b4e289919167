"""Messages become the turns that chat templates know."""

import re
from typing import Any

import pytest

from engine_core.errors import InvalidRequestError
from engine_core.openai import Message, parse_body
from engine_core.tool_calls import HERMES, MISTRAL, ToolFormat
from engine_core.turns import read_turns

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
QUESTION = {"role": "user", "content": "Is it raining?"}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "It is."}


def turns(*messages: Any, form: ToolFormat | None = HERMES) -> list[dict[str, Any]]:
    return read_turns(parse_body(list(messages), list[Message]), form)


def test_parts_are_joined_and_a_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turns({"role": "developer", "content": parts, "name": "n"}) == [
        {"role": "system", "content": "ab", "name": "n"}
    ]


def test_calls_have_objects_as_arguments_and_results_the_name_of_their_function() -> None:
    assert turns(QUESTION, ASKED, RESULT)[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                CALL | {"function": {"name": "weather", "arguments": {"city": "Paris"}}},
            ],
        },
        {"role": "tool", "content": "It is.", "tool_call_id": "call_1", "name": "weather"},
    ]


def test_mistrals_templates_get_ids_of_nine_letters_and_digits() -> None:
    _, asked, result = turns(QUESTION, ASKED, RESULT, form=MISTRAL)
    id_ = asked["tool_calls"][0]["id"]
    assert re.fullmatch("[0-9a-z]{9}", id_)
    assert result["tool_call_id"] == id_


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_a_part_that_is_not_text_is_named_with_its_place(kind: str) -> None:
    parts = [{"type": "text", "text": "What?"}, {"type": kind}]
    with pytest.raises(InvalidRequestError, match="reads text only") as refusal:
        turns({"role": "user", "content": parts})
    error = refusal.value
    assert (error.param, error.code) == ("messages[0].content[1]", "unsupported_parameter")


def call(**function: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{}"} | function}],
    }


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "What?"}, {}]},
            "messages[1].content[1].type",
        ),
        ({"role": "user", "content": "", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "function", "content": "", "name": "f"}, "messages[1].role"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[1].function_call"),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[1].audio"),
        ({"role": "tool", "content": ""}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "", "tool_call_id": "x"}, "messages[1].tool_call_id"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].id"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]},
            "messages[1].tool_calls[0].type",
        ),
        (call(arguments="{"), "messages[1].tool_calls[0].function.arguments"),
        (call(arguments="[1]"), "messages[1].tool_calls[0].function.arguments"),
        (call(arguments='{"a":' * 9999), "messages[1].tool_calls[0].function.arguments"),
        (call(arguments='{"a": "\ud800"}'), "messages[1].tool_calls[0].function.arguments"),
        (call(arguments={}), "messages[1].tool_calls[0].function.arguments"),
    ],
)
def test_what_is_wrong_in_a_message_is_named(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        turns(QUESTION, message)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("message", "param"), [(ASKED, "messages[0].tool_calls"), (RESULT, "messages[0].role")]
)
def test_a_model_without_tools_takes_no_turns_of_tools(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        turns(message, form=None)
    assert (refusal.value.param, refusal.value.code) == (param, "unsupported_parameter")
