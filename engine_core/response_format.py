"""What `response_format` asks the answer to look like."""

from typing import Any, Literal

import msgspec

from engine_core.grammar import Grammar
from engine_core.openai import Name, parse_body

FIELD = "response_format"


class _JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object"]


class _Schema(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    json_schema: _JsonSchema


def read_response_format(raw: dict[str, Any] | None) -> Grammar | None:
    """Return the grammar of the answer, None for any text.

    Raises:
        InvalidRequestError: says what is wrong with the field.
    """
    if raw is None:
        return None
    if raw.get("type") == "json_schema":
        schema = parse_body(raw, _Schema, FIELD).json_schema.schema
        if schema is not None:
            text = msgspec.json.encode(schema).decode()
            return Grammar("json_schema", text, param=f"{FIELD}.json_schema")
        return Grammar("json_object")
    plain = parse_body(raw, _Plain, FIELD)
    return Grammar("json_object") if plain.type == "json_object" else None
