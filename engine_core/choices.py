"""The choices of one answer, generated side by side."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from engine_core.tool_calls import ToolCall, ToolSplitter
from engine_core.types import Event, FinishEvent, FinishReason, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to a choice; perhaps nothing."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.tokens)


class Choice:
    """One choice while it grows.

    Args:
        splitter: What takes tool calls out of its text; None if there are no tools.
    """

    def __init__(self, splitter: ToolSplitter | None) -> None:
        self._splitter = splitter
        self.calls = 0
        self.usage: Usage | None = None
        """None until it is finished, like `finish_reason`."""
        self.finish_reason: FinishReason | Literal["tool_calls"] | None = None

    def take(self, event: Event) -> Delta:
        """Account for one event; return what is certain now."""
        if isinstance(event, FinishEvent):
            delta = self._split(None)
            called = self.calls and event.reason == "stop"
            self.finish_reason = "tool_calls" if called else event.reason
            self.usage = event.usage
            return delta
        return self._split(event.text, event.logprobs)

    def _split(self, text: str | None, tokens: tuple[TokenLogprob, ...] = ()) -> Delta:
        if self._splitter is None:
            return Delta(text or "", (), tokens)
        pieces = self._splitter.flush() if text is None else self._splitter.push(text)
        calls = tuple(piece for piece in pieces if isinstance(piece, ToolCall))
        self.calls += len(calls)
        return Delta("".join(p for p in pieces if isinstance(p, str)), calls, tokens)


async def side_by_side(
    sources: Sequence[AsyncGenerator[Event, None]],
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of several generations as they come, with the index of each.

    The first that fails ends them all with its error; closing this closes them all.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as events:
            async for event in events:
                yield 0, event
        return
    # No longer than all the answers together: engines hold their events in the same way.
    arrived: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_forward(index, source, arrived))
        for index, source in enumerate(sources)
    ]
    try:
        running = len(tasks)
        while running:
            index, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(
    index: int,
    source: AsyncGenerator[Event, None],
    arrived: asyncio.Queue[tuple[int, Event | Exception | None]],
) -> None:
    end: Exception | None = None
    try:
        async with aclosing(source) as events:
            async for event in events:
                arrived.put_nowait((index, event))
    except Exception as error:  # noqa: BLE001 - it is raised where the events are read
        end = error
    arrived.put_nowait((index, end))
