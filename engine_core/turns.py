"""A client's messages as the turns that chat templates know."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine_core.errors import InvalidRequestError
from engine_core.openai import Message, parse_body
from engine_core.tool_calls import ToolFormat

_SHORT_ID = 9  # letters and digits, which is all that Mistral's templates take


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    type: Literal["function"]
    function: _Function


def read_turns(messages: Sequence[Message], form: ToolFormat | None) -> list[dict[str, Any]]:
    """Return turns whose `role` and `content` are text and whose calls' arguments are objects.

    Args:
        messages: As the client sent them.
        form: How the model writes tool calls; None if it knows none, and then neither calls nor
            their results may be among the messages.

    Raises:
        InvalidRequestError: names the message and what is wrong with it.
    """
    called: dict[str, str] = {}  # names of the functions by the ids of their calls
    return [_turn(f"messages[{at}]", m, form, called) for at, m in enumerate(messages)]


def _turn(
    where: str, message: Message, form: ToolFormat | None, called: dict[str, str]
) -> dict[str, Any]:
    if message.role == "function":
        raise _unsupported(f"{where}.role", "turns of functions, the old form of tools")
    for field in ("function_call", "audio"):
        if getattr(message, field):
            raise _unsupported(f"{where}.{field}", "function calls in their old form and audio")
    if form is None and (message.role == "tool" or message.tool_calls):
        field = "role" if message.role == "tool" else "tool_calls"
        raise _unsupported(f"{where}.{field}", "turns of tools with this model")
    turn: dict[str, Any] = {"role": message.role, "content": _text(where, message)}
    if message.role == "developer":
        # OpenAI's new name of `system`; the templates of open models know only the old one.
        turn["role"] = "system"
    if message.name is not None:
        turn["name"] = message.name
    if form is not None and message.role == "assistant" and message.tool_calls:
        turn["tool_calls"] = _calls(f"{where}.tool_calls", message.tool_calls, form, called)
    elif message.tool_calls:
        raise InvalidRequestError(
            f"'{where}.tool_calls' belongs to turns of the assistant.", param=f"{where}.tool_calls"
        )
    if form is not None and message.role == "tool":
        turn |= _result(f"{where}.tool_call_id", message, form, called)
    return turn


def _text(where: str, message: Message) -> str:
    if isinstance(message.content, list):
        for at, part in enumerate(message.content):
            _check_part(f"{where}.content[{at}]", part)
    elif message.content is None and not message.tool_calls:
        raise InvalidRequestError(f"'{where}.content' is missing.", param=f"{where}.content")
    return message.text()


def _check_part(where: str, part: dict[str, Any]) -> None:
    if not isinstance(part.get("type"), str):
        raise InvalidRequestError(f"'{where}.type' must be text.", param=f"{where}.type")
    if part["type"] != "text":
        raise InvalidRequestError(
            f"This model reads text only, and '{where}' is no text; leave it out.",
            param=where,
            code="unsupported_parameter",
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"'{where}.text' must be text.", param=f"{where}.text")


def _calls(
    where: str, raw: list[dict[str, Any]], form: ToolFormat, called: dict[str, str]
) -> list[dict[str, Any]]:
    calls = parse_body(raw, list[_Call], where)
    called.update((call.id, call.function.name) for call in calls)
    return [
        {
            "id": _template_id(call.id, form),
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": _arguments(f"{where}[{at}].function.arguments", call.function),
            },
        }
        for at, call in enumerate(calls)
    ]


def _arguments(where: str, function: _Function) -> dict[str, Any]:
    try:
        return msgspec.json.decode(function.arguments, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise InvalidRequestError(
            f"'{where}' must be the text of a JSON object.", param=where
        ) from None


def _result(
    where: str, message: Message, form: ToolFormat, called: dict[str, str]
) -> dict[str, Any]:
    id_ = message.tool_call_id
    if id_ is None or id_ not in called:
        raise InvalidRequestError(
            f"'{where}' must be the id of a call in an earlier turn of the assistant.", param=where
        )
    # Some templates show the function's name beside its result, and OpenAI's turns lack it.
    return {"tool_call_id": _template_id(id_, form), "name": called[id_]}


def _template_id(id_: str, form: ToolFormat) -> str:
    if not form.short_ids:
        return id_
    return hashlib.sha256(id_.encode("utf-8", "surrogatepass")).hexdigest()[:_SHORT_ID]


def _unsupported(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"This engine does not support {what}, as in '{param}'.",
        param=param,
        code="unsupported_parameter",
    )
