"""The OpenAI wire format that Tidegate speaks: strict request structs and their parser.

The router's door and the engine server parse with the same structs, so that a request means the
same in both. Unknown fields are refused by name; values are never echoed into an error.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine_core.errors import InvalidRequestError

MAX_NEW_TOKENS = 131_072
"""Largest `max_tokens` that is taken seriously; above it the request is a mistake."""
MAX_JSON_DEPTH = 64

NonEmpty = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
"""Of a function or a schema, as OpenAI has it."""
StopString = Annotated[str, Meta(min_length=1, max_length=64)]
Stop = StopString | Annotated[list[StopString], Meta(min_length=1, max_length=4)] | None
TokenCount = Annotated[int, Meta(ge=1, le=MAX_NEW_TOKENS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a conversation; `content` is text or OpenAI's list of parts."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    audio: dict[str, Any] | None = None
    annotations: list[dict[str, Any]] | None = None

    def text(self) -> str:
        """Return the text of the turn; parts that are not text are left out."""
        if isinstance(self.content, list):
            return "".join(str(p.get("text", "")) for p in self.content if p.get("type") == "text")
        return self.content or ""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`: whether a usage chunk ends the stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that chat and plain completions share."""

    model: NonEmpty
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    stop: Stop = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=300)] | None = None
    user: str | None = None
    # Not OpenAI's, but what local servers agree on.
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    cache_salt: NonEmpty | None = None


class ChatRequest(_Common, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    moderation: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    def new_tokens(self) -> int | None:
        """Return the limit on generated tokens, or None if the client set none."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Common, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/completions`; a prompt is text, texts or token ids."""

    prompt: str | Annotated[list[str | int], Meta(min_length=1, max_length=MAX_NEW_TOKENS)]
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=16)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None

    def new_tokens(self) -> int | None:
        """Return the limit on generated tokens, or None if the client set none."""
        return self.max_tokens


Parsed = TypeVar("Parsed")

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_ENUM_VALUE = re.compile(r"(?<=^Invalid enum value).*", re.DOTALL)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises:
        InvalidRequestError: not UTF-8 JSON, nested deeper than `MAX_JSON_DEPTH`, or no object.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequestError(f"The body is not valid JSON: {reason}.") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    if _depth_exceeds(value, MAX_JSON_DEPTH):
        raise InvalidRequestError(f"The body is nested deeper than {MAX_JSON_DEPTH} levels.")
    return value


def parse_body(raw: Any, type: type[Parsed], field: str = "") -> Parsed:  # noqa: A002
    """Check a decoded body, or one field of it, against its type.

    Args:
        raw: What JSON was decoded to.
        type: A struct, or what else msgspec converts to.
        field: Where `raw` stands in the body; empty for the body itself.

    Raises:
        InvalidRequestError: names the field; never repeats its value.
    """
    try:
        return msgspec.convert(raw, type)
    except msgspec.ValidationError as error:
        raise _explain(str(error), field) from None


def _explain(message: str, field: str) -> InvalidRequestError:
    where = _PATH.search(message)
    path = where.group(1) if where else ""
    path = field + path if path.startswith("[") else ".".join(filter(None, (field, path)))
    text = message[: where.start()] if where else message
    for pattern, verb in ((_UNKNOWN, "Unknown field"), (_MISSING, "Missing field")):
        if found := pattern.search(text):
            whole = ".".join(filter(None, (path, found.group(1))))
            code = "unknown_parameter" if pattern is _UNKNOWN else "missing_required_parameter"
            return InvalidRequestError(f"{verb} '{whole}'.", param=whole, code=code)
    text = _ENUM_VALUE.sub("", text)
    return InvalidRequestError(f"Invalid '{path}': {text}.", param=path or None)


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
