"""OpenAI's response bodies, streamed and whole, for chat and for plain completions."""

import time
import uuid
from typing import Any

import msgspec

from engine_core.choices import Choice, Delta
from engine_core.errors import ApiError, EngineFailureError
from engine_core.logprobs import ChatLogprobs, CompletionLogprobs
from engine_core.requests import Ask
from engine_core.tool_calls import ToolCall
from engine_core.types import Engine, Event

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class _Writer:
    """What both ways of answering share.

    Args:
        ask: What is answered.
        engine: Who answers.
        kind: OpenAI's name of the body.
    """

    def __init__(self, ask: Ask, engine: Engine, kind: str) -> None:
        self._ask = ask
        self._choices = [
            Choice(ask.tools.splitter() if ask.tools else None) for _ in ask.generations
        ]
        self._logprobs: list[ChatLogprobs | CompletionLogprobs] = []
        if ask.logprobs:
            form = ChatLogprobs if ask.chat else CompletionLogprobs
            self._logprobs = [form(engine.tokenizer) for _ in ask.generations]
        self._head: dict[str, Any] = {
            "id": ask.generations[0].id,
            "object": kind,
            "created": int(time.time()),
            "model": engine.model,
        }

    def _choice(self, index: int, said: dict[str, Any], delta: Delta | None) -> dict[str, Any]:
        """Return one choice; without a delta it has nothing to say of its tokens."""
        logprobs = None
        if self._logprobs and delta is not None:
            logprobs = self._logprobs[index].write(delta.tokens)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": None}

    def _usage(self) -> dict[str, Any]:
        usages = [choice.usage for choice in self._choices if choice.usage is not None]
        if len(usages) < len(self._choices):
            raise EngineFailureError("The engine ended without finishing the answer.")
        prompt = usages[0].prompt_tokens  # the same of all choices, and counted once
        completion = sum(usage.completion_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            # What one choice reuses of another was not there before the request.
            "prompt_tokens_details": {"cached_tokens": min(u.cached_tokens for u in usages)},
        }


class WholeWriter(_Writer):
    """Writes an answer that is not streamed."""

    def __init__(self, ask: Ask, engine: Engine) -> None:
        super().__init__(ask, engine, "chat.completion" if ask.chat else "text_completion")
        self._deltas: list[list[Delta]] = [[] for _ in ask.generations]

    def take(self, index: int, event: Event) -> None:
        """Take one event of a choice."""
        self._deltas[index].append(self._choices[index].take(event))

    def body(self) -> bytes:
        """Return the JSON; takes long where log probabilities were asked for.

        Raises:
            EngineFailureError: a choice has not been finished.
        """
        usage = self._usage()
        choices = [self._whole(index) for index in range(len(self._choices))]
        return _encode({**self._head, "choices": choices, "usage": usage})

    def _whole(self, index: int) -> dict[str, Any]:
        parts = self._deltas[index]
        delta = Delta(
            "".join(part.text for part in parts),
            tuple(call for part in parts for call in part.calls),
            tuple(token for part in parts for token in part.tokens),
        )
        said: dict[str, Any] = {"text": delta.text}
        if self._ask.chat:
            content = delta.text or None if delta.calls else delta.text
            said = {"message": {"role": "assistant", "content": content, "refusal": None}}
            if delta.calls:
                said["message"]["tool_calls"] = [_call(call) for call in delta.calls]
        choice = self._choice(index, said, delta)
        return choice | {"finish_reason": self._choices[index].finish_reason}


class StreamWriter(_Writer):
    """Writes the events of a streamed answer."""

    def __init__(self, ask: Ask, engine: Engine) -> None:
        super().__init__(ask, engine, "chat.completion.chunk" if ask.chat else "text_completion")

    def opening(self) -> bytes:
        """Return what opens a stream: the role of each choice in a chat, else nothing."""
        if not self._ask.chat:
            return b""
        role = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._chunk(i, role) for i in range(len(self._choices)))

    def take(self, index: int, event: Event) -> bytes:
        """Return what tells of one event of a choice, perhaps nothing."""
        choice = self._choices[index]
        called = choice.calls
        delta = choice.take(event)
        written = self._chunk(index, self._said(delta, called), delta) if delta else b""
        if choice.finish_reason is not None:
            end: dict[str, Any] = {"delta": {}} if self._ask.chat else {"text": ""}
            written += self._chunk(index, end | {"finish_reason": choice.finish_reason})
        return written

    def closing(self) -> bytes:
        """Return what ends a good stream.

        Raises:
            EngineFailureError: a choice has not been finished.
        """
        usage = self._usage()
        if not self._ask.usage_chunk:
            return DONE
        return _event({**self._head, "choices": [], "usage": usage}) + DONE

    def _said(self, delta: Delta, called: int) -> dict[str, Any]:
        if not self._ask.chat:
            return {"text": delta.text}
        said: dict[str, Any] = {}
        if delta.text or not delta.calls:
            said["content"] = delta.text
        if delta.calls:
            said["tool_calls"] = [
                {"index": called + at, **_call(call)} for at, call in enumerate(delta.calls)
            ]
        return {"delta": said}

    def _chunk(self, index: int, said: dict[str, Any], delta: Delta | None = None) -> bytes:
        body = {**self._head, "choices": [self._choice(index, {}, delta) | said]}
        # OpenAI has the field in every chunk of a stream that will end with usage.
        return _event({**body, "usage": None} if self._ask.usage_chunk else body)


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream which broke; no `[DONE]` may follow it."""
    return _event(error.body())


def to_json(body: Any) -> bytes:
    """Encode any other response body."""
    return _encode(body)


def _event(body: dict[str, Any]) -> bytes:
    # JSON has no raw line breaks, so one line holds it.
    return b"data: " + _encode(body) + b"\n\n"


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
