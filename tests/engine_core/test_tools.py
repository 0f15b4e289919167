"""What a request wants of tools."""

from typing import Any

import pytest

from engine_core.errors import InvalidRequestError
from engine_core.grammar import Grammar
from engine_core.openai import ChatRequest, parse_body
from engine_core.tool_calls import HERMES, LLAMA, ToolFormat
from engine_core.tools import ToolUse, read_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}
STRICT = {"type": "function", "function": {"name": "auto", "strict": True}}


def read(
    *, form: ToolFormat | None = HERMES, answer: Grammar | None = None, **fields: Any
) -> ToolUse | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return read_tools(parse_body(body, ChatRequest), form, "tiny", answer)


def given(**fields: Any) -> ToolUse:
    use = read(**fields)
    assert use is not None
    return use


def test_templates_see_every_part_of_a_function() -> None:
    use = given(tools=[WEATHER, NOW])
    assert use.shown == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "", "parameters": SCHEMA},
        },
        {
            "type": "function",
            "function": {
                "name": "now",
                "description": "The time.",
                "parameters": {
                    "type": "object",
                    "properties": {},
                    "additionalProperties": False,
                },
            },
        },
    ]
    assert use.names == {"weather", "now"}
    assert use.parallel
    assert use.grammar is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": []},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [WEATHER], "tool_choice": "none"},
    ],
)
def test_a_model_without_tools_is_asked_for_none(fields: dict[str, Any]) -> None:
    assert read(form=None, **fields) is None


def test_a_model_that_knows_no_tools_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="chat template of tiny") as refusal:
        read(form=None, tools=[WEATHER])
    assert (refusal.value.param, refusal.value.code) == ("tools", "unsupported_parameter")


def test_required_calls_are_enforced() -> None:
    use = given(tools=[WEATHER, NOW], tool_choice="required")
    assert use.grammar is not None
    assert use.grammar.kind == "lark"
    assert "weather" in use.grammar.text
    assert "now" in use.grammar.text


def test_a_named_function_is_called_once_and_alone() -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    use = given(tools=[WEATHER, NOW], tool_choice=choice)
    assert len(use.shown) == 2
    assert use.names == {"now"}
    assert not use.parallel
    assert use.grammar is not None
    assert "weather" not in use.grammar.text


def test_a_function_may_be_called_like_a_choice() -> None:
    assert given(tools=[STRICT, NOW], tool_choice="auto").names == {"auto", "now"}


def test_one_strict_tool_has_all_arguments_enforced() -> None:
    assert given(tools=[WEATHER, STRICT]).grammar is not None


def test_parallel_calls_can_be_ruled_out() -> None:
    assert not given(tools=[WEATHER], parallel_tool_calls=False).parallel


def test_a_response_format_holds_for_answers_without_a_call() -> None:
    use = given(tools=[WEATHER], answer=Grammar("json_object"))
    assert use.grammar is not None
    assert " | %json" in use.grammar.text


def test_llamas_answers_are_either_calls_or_json() -> None:
    answer = Grammar("json_object")
    with pytest.raises(InvalidRequestError) as refusal:
        read(form=LLAMA, tools=[WEATHER], answer=answer)
    assert refusal.value.param == "response_format"
    assert read(form=LLAMA, tools=[WEATHER], answer=answer, tool_choice="required")


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools[0].type"),
        ({"tools": function(name="")}, "tools[0].function.name"),
        ({"tools": function(name="a b")}, "tools[0].function.name"),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters"),
        ({"tools": function(parameters={"type": "string"})}, "tools[0].function.parameters.type"),
        ({"tools": function(colour="red")}, "tools[0].function.colour"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read(**fields)
    assert refusal.value.param == param
