"""Grammars of tool calls, tried letter by letter with the library that will enforce them."""

import json
from collections.abc import Callable
from typing import Any

import llguidance
import pytest

from engine_core.grammar import Grammar
from engine_core.tool_calls import HERMES, LLAMA, MISTRAL, ToolCall, ToolFormat, ToolSplitter
from engine_core.tool_grammar import tool_grammar

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "day": {"$ref": "#/$defs/Day"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Day": {"enum": ["today", "tomorrow"]}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"weather": WEATHER, "now": NOTHING}
PARIS = ("weather", '{"city": "Paris", "day": "today"}')
NOW = ("now", "{}")


def written(form: ToolFormat, *calls: tuple[str, str]) -> str:
    """Return calls as the grammar has them written."""
    objects = [form.before_arguments(name) + arguments + "}" for name, arguments in calls]
    if form.listed:
        return f"{form.opening}[{', '.join(objects)}]"
    if form.closing:
        return "\n".join(f"{form.opening}\n{each}\n{form.closing}" for each in objects)
    return objects[0]


def matcher(grammar: Grammar) -> Callable[[str], bool]:
    """Return what says whether a text is an answer that the grammar allows."""
    tokenizer = llguidance.LLTokenizer("byte")
    source = llguidance.LLMatcher.grammar_from_lark(grammar.text)
    assert llguidance.LLMatcher.validate_grammar(source, tokenizer) == ""

    def allows(text: str) -> bool:
        state = llguidance.LLMatcher(tokenizer, source, log_level=0)
        return state.consume_tokens(list(text.encode())) and state.is_accepting()

    return allows


FORMS = pytest.mark.parametrize(
    "form", [HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"]
)


@FORMS
@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_must_come_is_all_there_can_be(form: ToolFormat, parallel: bool) -> None:
    allows = matcher(tool_grammar(form, TOOLS, must_call=True, parallel=parallel))
    assert allows(written(form, PARIS))
    assert allows(written(form, NOW))
    assert not allows("")
    assert not allows("Hello")
    assert not allows("Hello " + written(form, PARIS))
    assert not allows(written(form, PARIS) + " bye")
    assert not allows(written(form, PARIS)[:-1])
    assert not allows(written(form, ("rain", "{}")))
    assert not allows(written(form, ("now", '{"zone": 1}')))
    assert not allows(written(form, ("weather", "{}")))
    assert not allows(written(form, ("weather", '{"city": "Paris", "day": "never"}')))
    assert not allows(written(form, ("now", "{  }")))
    if form is not LLAMA:
        assert allows(written(form, PARIS, NOW)) is parallel


@FORMS
@pytest.mark.parametrize("parallel", [True, False])
def test_text_may_stand_beside_calls_but_no_wrong_call(form: ToolFormat, parallel: bool) -> None:
    allows = matcher(tool_grammar(form, TOOLS, must_call=False, parallel=parallel))
    assert allows("")
    assert allows("Hello, 1 < 2.\n")
    assert allows(written(form, PARIS))
    assert not allows(written(form, PARIS)[:-1])
    assert not allows(written(form, ("weather", "{}")))
    if form is not LLAMA:
        assert allows("I look.\n" + written(form, PARIS))
        assert not allows("I look.\n" + written(form, ("rain", "{}")))
    if form is HERMES:
        assert allows(written(form, PARIS) + "\nDone.")
        assert allows(written(form, PARIS, NOW))


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=["hermes", "mistral"])
def test_without_a_call_the_answer_has_its_own_format(form: ToolFormat) -> None:
    schema = '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}'
    for answer, other in ((Grammar("json_schema", schema), False), (Grammar("json_object"), True)):
        allows = matcher(tool_grammar(form, TOOLS, must_call=False, parallel=True, answer=answer))
        assert allows('{"x": 1}')
        assert allows('{"y": 1}') is other
        assert allows(written(form, PARIS))
        assert not allows("Hello")


@FORMS
def test_names_and_schemas_are_never_read_as_grammar(form: ToolFormat) -> None:
    schema = {
        "type": "object",
        "properties": {'a"}\nstart: /.*/': {"const": '"\n%json {'}},
        "required": ['a"}\nstart: /.*/'],
        "x-guidance": {"whitespace_flexible": True},
    }
    allows = matcher(tool_grammar(form, {"f": schema}, must_call=True, parallel=False))
    assert allows(written(form, ("f", json.dumps({'a"}\nstart: /.*/': '"\n%json {'}))))
    assert not allows("x")


@FORMS
def test_what_the_grammar_writes_is_read_back(form: ToolFormat) -> None:
    splitter = ToolSplitter(form, TOOLS, parallel=True)
    calls = (PARIS,) if form is LLAMA else (PARIS, NOW)
    pieces = [*splitter.push(written(form, *calls)), *splitter.flush()]
    assert pieces == [ToolCall(*call) for call in calls]
