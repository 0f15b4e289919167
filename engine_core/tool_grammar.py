"""Grammars that leave a model no way to write a tool call wrongly.

They are in llguidance's dialect of Lark. The arguments of each tool are a JSON schema of their own,
so that a `$ref` in it finds its definitions.
"""

import json
from collections.abc import Mapping
from typing import Any

from engine_core.grammar import JSON_STYLE, Grammar
from engine_core.tool_calls import ToolFormat

_NEWLINE = '"\\n"'


def tool_grammar(
    form: ToolFormat,
    tools: Mapping[str, Mapping[str, Any]],
    *,
    must_call: bool,
    parallel: bool,
    answer: Grammar | None = None,
) -> Grammar:
    """Return the grammar of an answer whose calls are valid.

    Args:
        form: How the model writes calls.
        tools: JSON schemas of the arguments, by the tools' names.
        must_call: Whether there must be a call; otherwise there may also be text.
        parallel: Whether there may be several calls.
        answer: What an answer without a call must match: a schema or any JSON object; None for any
            text, and then text and calls may also follow each other.
    """
    objects = [
        f"{_text(form.before_arguments(name))} {_json(schema)} {_text('}')}"
        for name, schema in tools.items()
    ]
    rules = [f"object: {' | '.join(objects)}", f"body: {_body(form, parallel)}"]
    if must_call:
        start = _calls(form, parallel)
    elif answer is not None:
        schema = json.loads(answer.text) if answer.text else {"type": "object"}
        start = f"{_calls(form, parallel)} | {_json(schema)}"
    else:
        start = _text_and_calls(form, parallel)
        rules += [
            "TEXT: /(.|\\n)*/",
            "NO_CALL: /[^{\\s](.|\\n)*/",
            # A lazy rule ends where the opening does, so that no text can hold one.
            f"opened[lazy]: TEXT {_text(form.opening)}",
        ]
    return Grammar("lark", "\n".join([f"start: {start}", *rules]) + "\n", param="tools")


def _body(form: ToolFormat, parallel: bool) -> str:
    """Return what stands after the opening."""
    if form.listed:
        more = f" ({_text(', ')} object)*" if parallel else ""
        return f"{_text('[')} object{more} {_text(']')}"
    if form.closing:
        return f"{_NEWLINE} object {_NEWLINE} {_text(form.closing)}"
    return "object"


def _calls(form: ToolFormat, parallel: bool) -> str:
    """Return an answer of nothing but calls."""
    call = f"{_text(form.opening)} body"
    return f"{call} ({_NEWLINE} {call})*" if parallel and form.closing else call


def _text_and_calls(form: ToolFormat, parallel: bool) -> str:
    """Return an answer of text, of calls, or of both where the form has them beside each other."""
    if not form.opening:
        return "body | NO_CALL |"
    if not form.closing:
        return "TEXT | opened body"
    return "(opened body)* TEXT" if parallel else "TEXT | opened body TEXT"


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"


def _text(text: str) -> str:
    return json.dumps(text)
