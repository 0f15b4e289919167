"""Requests into an engine and events out of it: the vocabulary of every engine."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from engine_core.grammar import Grammar
from engine_core.tool_calls import ToolFormat

if TYPE_CHECKING:
    # Only engines need the libraries behind it.
    from engine_core.grammar_compiler import TokenMatcher

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
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits, -100 to 100, before everything else."""


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """All it takes to draw a sequence's tokens from its logits alone.

    Args:
        temperature: 0 for the likeliest token.
        seed: 0 to 2**64 - 1; the same seed draws the same tokens at the same places.
    """

    temperature: float
    seed: int


PRIORITIES: Mapping[str, int] = MappingProxyType(
    {"critical": 0, "standard": 1, "sheddable": 2, "batch": 3}
)
"""The classes of requests; smaller goes first."""


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
        logprobs: How many of the likeliest tokens to report at each place, 0 for the drawn one
            alone; None reports nothing.
        grammar: What the text must match; None for any text.
        cache_salt: Keys and values of earlier prompts are used again only for requests with the
            same salt: one per tenant.
        priority: A value of `PRIORITIES`.
        deadline: `time.monotonic()` after which the answer is worth nothing; None for never.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    continues: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None
    cache_salt: str = ""
    priority: int = PRIORITIES["standard"]
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens in and out of one request; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One drawn token, its natural-log probability and the likeliest ones at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of text, never empty, that ends on a character boundary.

    `logprobs` has the tokens drawn since the event before, where the request asked for them.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


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
    """Keys and values of the running requests' tokens; what is kept for later ones is not in it."""
    kv_total_bytes: int
    """Most that keys and values may take, of running requests and kept."""
    rss_bytes: int
    tokens_per_second: float
    """Generated tokens in the last 10 s, per second."""
    generated_tokens_total: int
    requests_total: int
    cancelled_total: int
    failed_total: int
    uptime_seconds: float
    cached_prompt_tokens_total: int = 0
    """Prompt tokens whose keys and values an earlier request had left."""
    preempted_total: int = 0
    """How often a sequence had to make room for others and begin anew."""
    memory: dict[str, int] = {}
    """Where the process's bytes are; the parts add up to about `rss_bytes`. `kv` among them is
    all that is resident of keys and values: those of running requests and those that are kept."""
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

    @property
    def follows_grammars(self) -> bool:
        """Whether `matcher` can hold answers to a grammar at all."""
        ...

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None if it cannot be offered tools."""
        ...

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the ids of a conversation up to where the assistant speaks.

        Args:
            messages: Turns whose `role` and `content` are text; the arguments of `tool_calls` are
                objects.
            tools: What the assistant may call, as in OpenAI's API; needs a `tool_format`.

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

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token stands for in a text, or the name of a control token.

        It may be a part of a character, and nothing for an id that only pads the vocabulary.
        """
        ...

    def matcher(self, grammar: Grammar) -> "TokenMatcher":
        """Return what holds one answer to a grammar, from the answer's beginning.

        A grammar that is new to the tokenizer is compiled, which takes from tenths of a second to
        seconds; so ask once, away from any event loop, when the request is read. Grammars of late
        are kept, and asking again takes some 20 µs.

        Raises:
            InvalidRequestError: the grammar is wrong, uses what is not supported, or takes too much
                time or memory; or the tokenizer cannot do it. Names the grammar's `param`.
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

    @property
    def most_requests(self) -> int:
        """Most requests that it holds at once, running and waiting; known after `start`.

        More together would be refused however often they are tried.
        """
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

    async def pressure(self, level: int) -> dict[str, int]:
        """Give memory back at once, more of it at higher levels; return bytes before and after.

        Args:
            level: 0 to 4, normal to emergency. At every level working memory that no step is using
                goes; from 2 on also what is kept for requests that may come back.
        """
        ...

    async def close(self) -> None:
        """Cancel what runs and free the model."""
        ...
