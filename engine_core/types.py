"""Requests into an engine and events out of it: the vocabulary of every engine."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    `temperature` 0 means greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off.
    Penalties follow OpenAI's formula (presence, frequency) and CTRL's (repetition).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate.

    Args:
        id: Unique within the engine; names the request in stats and logs.
        prompt_ids: Token ids of the rendered prompt, at least one.
        max_tokens: Upper bound of generated tokens, at least 1; the engine also stops at its
            context window.
        sampling: How tokens are drawn.
        stop: Strings that end the text; they are not part of it.
        continues: The answer goes on in the prompt's own text, as in plain completions, so that a
            space before its first word belongs to it.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out of one request."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A non-empty piece of text that ends on a character boundary."""

    text: str


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The last event of a request that was not cancelled and did not fail."""

    reason: FinishReason
    usage: Usage


Event = TextEvent | FinishEvent


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of an engine, the body of `GET /engine/stats`. Bytes are bytes."""

    model: str
    running: int
    waiting: int
    kv_used_bytes: int
    kv_total_bytes: int
    rss_bytes: int
    tokens_per_second: float
    """Generated tokens in the last 10 s, per second."""
    generated_tokens_total: int
    requests_total: int
    cancelled_total: int
    failed_total: int
    uptime_seconds: float
    details: dict[str, str | int | float | bool] = {}
    """What only this kind of engine has: provider, precision, device, step mode."""


class TextStream(Protocol):
    """Turns one sequence's token ids into text as they come."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the whole characters it completes, perhaps none."""
        ...

    def flush(self) -> str:
        """Return what is still held back when the sequence ends."""
        ...


class ChatTokenizer(Protocol):
    """What the server and the engines need of a model's tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to `vocab_size` - 1."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a turn."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain completion prompt."""
        ...

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the ids of a conversation up to where the assistant speaks.

        Args:
            messages: Turns whose `role` and `content` are text.

        Raises:
            InvalidRequestError: the model's chat template refuses the conversation.
        """
        ...

    def stream(self, *, continues: bool = False) -> TextStream:
        """Return a fresh detokeniser for one sequence.

        Args:
            continues: The sequence goes on in a text; otherwise it begins one, and a tokenizer that
                marks the beginning with a space takes it away.
        """
        ...


class Engine(Protocol):
    """What the engine server serves. Edge, cloud and fake engines implement it."""

    @property
    def model(self) -> str:
        """The name that answers carry, e.g. `smollm2-135m-instruct`."""
        ...

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer; safe to use from any thread."""
        ...

    @property
    def context_window(self) -> int:
        """Most tokens, prompt and answer together, of one sequence; known after `start`."""
        ...

    async def start(self) -> None:
        """Become ready to generate; raises `ModelError` if that cannot be."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Yield text events and, last, a finish event.

        Closing the iterator, or cancelling the task that reads it, cancels the request in every
        phase within one step.

        Raises:
            OverloadedError: the waiting list is full.
            EngineFailureError: the step failed; only this request is lost.
        """
        ...

    def stats(self) -> EngineStats:
        """Return a reading; cheap, callable from the event loop at any time."""
        ...

    async def close(self) -> None:
        """Cancel what runs and free the model."""
        ...
