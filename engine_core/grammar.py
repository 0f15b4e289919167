"""What the text of an answer must look like, said without the library that enforces it.

Everybody may import this; `engine_core.grammar_compiler` is for engines.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
"""llguidance's `x-guidance` for JSON on one line, with a space or none after `,` and `:`.

JSON allows any whitespace between its tokens, and a small model that may write blanks for ever
sometimes does. One line also takes the fewest tokens.
"""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match as a whole.

    A grammar says what may come next. It does not make the answer end: a string without
    `maxLength` or a list without `maxItems` may go on until `max_tokens`, and then the answer is
    cut and `finish_reason` is `length`, as in OpenAI's API.

    Args:
        kind: `json_object` for any JSON object; `json_schema` for what a JSON schema describes,
            with properties in the order of the schema; `lark` for llguidance's dialect of Lark.
        text: The schema as JSON, or the Lark grammar; nothing for `json_object`.
        param: The field of the client's request that asks for it, for errors.
    """

    kind: Literal["json_object", "json_schema", "lark"]
    text: str = ""
    param: str = field(default="response_format", compare=False)

    def source(self) -> str:
        """Return the grammar as llguidance reads it.

        Raises:
            ValueError: the text of a schema is no JSON object; says why.
        """
        if self.kind == "lark":
            return json.dumps({"grammars": [{"lark_grammar": self.text}]})
        schema = _json_object(self.text) if self.kind == "json_schema" else {"type": "object"}
        # Ours in place of a client's own, which could switch off the enforcement of keywords.
        return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": JSON_STYLE}}]})


def _json_object(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply.") from None
    if not isinstance(schema, dict):
        raise ValueError("the schema must be an object.")  # noqa: TRY004 - JSON's types
    return schema
