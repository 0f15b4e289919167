"""OpenAI's response bodies, streamed and whole, for chat and for plain completions."""

import time
from typing import Any

import msgspec

from engine_core.errors import ApiError
from engine_core.requests import Ask
from engine_core.types import FinishReason, Usage

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class ResponseWriter:
    """Writes the JSON of one answer.

    Args:
        ask: What is answered.
        model: The name that the answer carries.
    """

    def __init__(self, ask: Ask, model: str) -> None:
        self._ask = ask
        kind = "chat.completion" if ask.chat else "text_completion"
        if ask.chat and ask.stream:
            kind = "chat.completion.chunk"
        self._head: dict[str, Any] = {
            "id": ask.generation.id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""
        said: dict[str, Any] = {"text": text}
        if self._ask.chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return _encode({**self._head, "choices": [choice], "usage": _usage(usage)})

    def opening(self) -> bytes:
        """Return the event that opens a stream: the role in a chat, else nothing."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self._ask.chat else b""

    def piece(self, text: str) -> bytes:
        """Return the event of a piece of text."""
        return self._chunk({"content": text}, None) if self._ask.chat else self._text(text, None)

    def closing(self, reason: FinishReason, usage: Usage) -> bytes:
        """Return the events that end a good stream."""
        last = self._chunk({}, reason) if self._ask.chat else self._text("", reason)
        if self._ask.usage_chunk:
            last += event({**self._head, "choices": [], "usage": _usage(usage)})
        return last + DONE

    def _chunk(self, delta: dict[str, str], reason: FinishReason | None) -> bytes:
        return self._choice({"delta": delta}, reason)

    def _text(self, text: str, reason: FinishReason | None) -> bytes:
        return self._choice({"text": text}, reason)

    def _choice(self, said: dict[str, Any], reason: FinishReason | None) -> bytes:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        body = {**self._head, "choices": [choice]}
        # OpenAI has the field in every chunk of a stream that will end with usage.
        return event({**body, "usage": None} if self._ask.usage_chunk else body)


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event. JSON has no raw line breaks, so one line holds it."""
    return b"data: " + _encode(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream which broke; no `[DONE]` may follow it."""
    return event(error.body())


def to_json(body: Any) -> bytes:
    """Encode any other response body."""
    return _encode(body)


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
