"""Grammars as data: what the compiler gets to read."""

import json
import subprocess
import sys

import pytest

from engine_core.grammar import JSON_STYLE, Grammar


def only_part(grammar: Grammar) -> dict[str, object]:
    (part,) = json.loads(grammar.source())["grammars"]
    return dict(part)


def test_any_object_is_a_schema() -> None:
    assert only_part(Grammar("json_object")) == {
        "json_schema": {"type": "object", "x-guidance": JSON_STYLE}
    }


def test_a_client_cannot_loosen_its_own_schema() -> None:
    grammar = Grammar("json_schema", '{"type": "string", "x-guidance": {"lenient": true}}')
    assert only_part(grammar) == {"json_schema": {"type": "string", "x-guidance": JSON_STYLE}}


def test_lark_is_passed_on() -> None:
    assert only_part(Grammar("lark", 'start: "a"')) == {"lark_grammar": 'start: "a"'}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "must be an object"),
        ("true", "must be an object"),
        ('{"type":', "Expecting value"),
        ('{"items":' * 100_000 + "{}" + "}" * 100_000, "too deeply"),
    ],
)
def test_what_is_no_schema_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Grammar("json_schema", text).source()


def test_the_same_grammar_for_another_field_is_the_same_grammar() -> None:
    assert len({Grammar("lark", "x"), Grammar("lark", "x", "tools"), Grammar("lark", "y")}) == 2


def test_requests_can_be_read_without_the_libraries_of_engines() -> None:
    code = (
        "import sys\n"
        "for name in ('llguidance', 'numpy', 'tokenizers'):\n"
        "    sys.modules[name] = None\n"
        "import engine_core.types, engine_core.requests, engine_core.fake_engine\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
