"""A deterministic engine without a model, for tests of everything around engines.

It repeats the prompt's last line byte by byte, as slowly as one likes, and fails when told to.
Requests run side by side up to a number of slots; the others wait in a bounded list.

    python -m engine_core.fake_engine serve --model fake --uds PATH --token-delay-ms 20
"""

import argparse
import asyncio
import codecs
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

from engine_core.answer import Answer, Draw
from engine_core.errors import EngineFailureError, InvalidRequestError, OverloadedError
from engine_core.grammar import Grammar
from engine_core.meters import Ending, Meters
from engine_core.process import add_serve_arguments, positive, run_engine
from engine_core.tool_calls import HERMES
from engine_core.types import (
    EngineStats,
    Event,
    FinishEvent,
    GenerationRequest,
    TokenLogprob,
)

EOS = 256
BYTES_PER_TOKEN = 1024
"""Pretended size of keys and values."""


class ByteTokenizer:
    """One token per UTF-8 byte, and one that ends a turn."""

    vocab_size = 257
    eos_ids = frozenset({EOS})
    tool_format = HERMES
    follows_grammars = False

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode(errors="replace"))

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the bytes of tools and turns, one line each as `role: text`."""
        lines = [f"tool: {tool['function']['name']}" for tool in tools or ()]
        for turn in messages:
            calls = [json.dumps(call["function"]) for call in turn.get("tool_calls", ())]
            lines.append(f"{turn['role']}: {turn['content']}{' '.join(calls)}")
        return self.encode("\n".join(lines))

    def stream(self, *, continues: bool = False) -> "ByteStream":  # noqa: ARG002 - bytes are bytes
        """Return a fresh decoder."""
        return ByteStream()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte, or the name of the end token."""
        return b"<end>" if token_id == EOS else bytes((token_id,))

    def matcher(self, grammar: Grammar) -> NoReturn:
        """Refuse: what is repeated cannot be made to match a grammar."""
        raise InvalidRequestError(
            f"The fake engine cannot honour '{grammar.param}'; it only repeats the prompt.",
            param=grammar.param,
            code="unsupported_parameter",
        )


class ByteStream:
    """Puts bytes together into whole characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take the next byte; return the character it completes, if any."""
        return self._decoder.decode(bytes((token_id,)))

    def flush(self) -> str:
        """Return what an unfinished character becomes."""
        return self._decoder.decode(b"", final=True)


class FakeEngine:
    """Answers every request with the last line of its prompt.

    Args:
        model: The name that answers carry.
        context_window: In tokens.
        slots: Requests that run at the same time.
        max_waiting: Requests that may wait for a slot.
        token_delay: Seconds before each token.
        start_delay: Seconds that `start` takes.
        fail_after: Tokens after which each request fails; None for never.
    """

    def __init__(
        self,
        *,
        model: str = "fake",
        context_window: int = 4096,
        slots: int = 8,
        max_waiting: int = 64,
        token_delay: float = 0.0,
        start_delay: float = 0.0,
        fail_after: int | None = None,
    ) -> None:
        self.model = model
        self.context_window = context_window
        self.most_requests = slots + max_waiting
        self.tokenizer = ByteTokenizer()
        self._slots = slots
        self._max_waiting = max_waiting
        self._token_delay = token_delay
        self._start_delay = start_delay
        self._fail_after = fail_after
        self._free = asyncio.Semaphore(slots)
        self._meters = Meters()
        self._waiting = 0
        self._kv_tokens: dict[str, int] = {}  # of each running request
        self._closing = False

    async def start(self) -> None:
        """Wait for the start delay."""
        await asyncio.sleep(self._start_delay)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Yield the request's events; see `engine_core.types.Engine`."""
        if self._closing:
            raise _closing_error()
        if self._waiting >= self._max_waiting and self._free.locked():
            raise OverloadedError(
                f"{self._waiting} requests are waiting already; try again later.",
                code="queue_full",
            )
        self._meters.accepted()
        ending: Ending = "cancelled"
        try:
            self._waiting += 1
            try:
                await self._free.acquire()
            finally:
                self._waiting -= 1
            try:
                self._kv_tokens[request.id] = len(request.prompt_ids)
                async with aclosing(self._run(request)) as events:
                    async for event in events:
                        if isinstance(event, FinishEvent):
                            ending = "finished"
                        yield event
            finally:
                self._kv_tokens.pop(request.id, None)
                self._free.release()
        except EngineFailureError:
            ending = "failed"
            raise
        finally:
            self._meters.ended(ending)

    async def _run(self, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        answer = Answer(request, self.tokenizer, self.context_window)
        for count, token in enumerate(_reply(request.prompt_ids)):
            await asyncio.sleep(self._token_delay)
            if self._closing:
                raise _closing_error()
            if count == self._fail_after:
                raise EngineFailureError(f"The fake engine fails after {count} tokens, as told.")
            self._meters.generated()
            self._kv_tokens[request.id] += 1
            if event := answer.push(_draw(token, request.logprobs)):
                yield event
            if reason := answer.finish_reason:
                yield FinishEvent(reason, answer.usage())
                return

    def stats(self) -> EngineStats:
        """Return a reading."""
        return self._meters.read(
            model=self.model,
            running=len(self._kv_tokens),
            waiting=self._waiting,
            kv_used_bytes=sum(self._kv_tokens.values()) * BYTES_PER_TOKEN,
            kv_total_bytes=self._slots * self.context_window * BYTES_PER_TOKEN,
            preempted_total=0,
            memory={},
            details={"kind": "fake"},
        )

    async def pressure(self, level: int) -> dict[str, int]:  # noqa: ARG002 - nothing to give
        """Return the memory before and after giving nothing back."""
        rss = self._meters.rss_bytes()
        return {"before": rss, "after": rss}

    async def close(self) -> None:
        """End what runs at its next token and refuse what waits."""
        self._closing = True


def _reply(prompt_ids: Sequence[int]) -> list[int]:
    last_line = bytes(id_ for id_ in prompt_ids if id_ != EOS).rpartition(b"\n")[2]
    return [*last_line.removeprefix(b"user: "), EOS]


def _draw(token: int, logprobs: int | None) -> Draw:
    """Return a draw without an alternative."""
    if logprobs is None:
        return Draw(token)
    return Draw(token, TokenLogprob(token, 0.0, ((token, 0.0),)[:logprobs]))


def _closing_error() -> OverloadedError:
    return OverloadedError("The engine is stopping.", code="draining")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine_core.fake_engine")
    serve = parser.add_subparsers(required=True, metavar="COMMAND").add_parser("serve")
    add_serve_arguments(serve)
    serve.add_argument("--slots", type=positive, default=8)
    serve.add_argument("--token-delay-ms", type=float, default=0.0)
    serve.add_argument("--start-delay", type=float, default=0.0, metavar="SECONDS")
    serve.add_argument("--fail-after", type=int, metavar="TOKENS")
    args = parser.parse_args(arguments)
    engine = FakeEngine(
        model=args.model,
        context_window=args.context or 4096,
        slots=args.slots,
        max_waiting=args.max_waiting,
        token_delay=args.token_delay_ms / 1000,
        start_delay=args.start_delay,
        fail_after=args.fail_after,
    )
    return run_engine(engine, args)


if __name__ == "__main__":
    sys.exit(main())
