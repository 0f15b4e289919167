"""What an answer is asked to look like."""

from typing import Any

import pytest

from engine_core.errors import InvalidRequestError
from engine_core.grammar import Grammar
from engine_core.response_format import read_response_format

SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}


@pytest.mark.parametrize("raw", [None, {"type": "text"}])
def test_text_has_no_grammar(raw: Any) -> None:
    assert read_response_format(raw) is None


@pytest.mark.parametrize(
    "raw", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a"}}]
)
def test_without_a_schema_any_object_will_do(raw: Any) -> None:
    assert read_response_format(raw) == Grammar("json_object")


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_enforced_whether_or_not_it_is_strict(strict: bool | None) -> None:
    inner = {"name": "a-B_1", "description": "d", "strict": strict, "schema": SCHEMA}
    grammar = read_response_format({"type": "json_schema", "json_schema": inner})
    assert grammar == Grammar(
        "json_schema", '{"type":"object","properties":{"é":{"type":"string"}}}'
    )


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "text", "more": 1}, "response_format.more"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name"),
        (
            {"type": "json_schema", "json_schema": {"name": "a b"}},
            "response_format.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a\n"}},
            "response_format.json_schema.name",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_what_is_wrong_is_named(raw: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_response_format(raw)
    assert refusal.value.param == param
