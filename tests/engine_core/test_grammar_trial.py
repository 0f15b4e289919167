"""The child process that compiles a grammar first, and what it must survive."""

import json
import sys
from typing import Any

import pytest

from engine_core.errors import EngineFailureError
from engine_core.grammar import Grammar
from engine_core.grammar_trial import Trial, try_grammar


def try_schema(schema: dict[str, Any]) -> Trial:
    return try_grammar(Grammar("json_schema", json.dumps(schema)).source())


def test_a_good_grammar_passes() -> None:
    trial = try_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert trial.error == ""
    assert trial.bytes < 16 * 1024**2


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"type": "string", "format": "password"}, "Unknown format: password"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"$ref": "https://example.com/schema"}, "does not fetch"),
        ({"type": "string", "enum": [1]}, "Unsatisfiable schema"),
        ({"$ref": "#"}, "nothing can match it"),
    ],
)
def test_what_is_not_supported_is_said(schema: dict[str, Any], reason: str) -> None:
    error = try_schema(schema).error
    assert reason in error
    assert "\n" not in error


SAME_ARRAYS = {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 3000}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"allOf": [{"type": "integer", "multipleOf": p} for p in (97, 101, 103, 107)]},
                     id="a common multiple of 108 million"),
        pytest.param({"type": "integer", "multipleOf": 999_983}, id="a large multiple"),
        pytest.param({"patternProperties": {f"^a{i}[a-z]{{0,1000}}$": True for i in range(1000)}},
                     id="patterns, each against each other"),
        pytest.param({"properties": {f"p{i}": True for i in range(7000)}}, id="many properties"),
        pytest.param({"enum": [f"value{i}" for i in range(100_000)]}, id="many values"),
        pytest.param({"$defs": SAME_ARRAYS, "$ref": "#/$defs/a"}, id="many ways to read a text"),
    ],
)  # fmt: skip
def test_a_grammar_that_would_take_minutes_or_gigabytes_is_given_up(schema: dict[str, Any]) -> None:
    assert try_schema(schema).error.startswith("it takes more than 2 s or 64 MiB to compile")


def test_a_child_that_does_not_work_is_the_engines_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineFailureError, match="does not work"):
        try_grammar("")
