"""Several generations side by side, and what their events make of a choice."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from engine_core.choices import Choice, Delta, side_by_side
from engine_core.errors import EngineFailureError
from engine_core.tool_calls import HERMES, ToolCall, ToolSplitter
from engine_core.types import Event, FinishEvent, TextEvent, TokenLogprob, Usage

END = FinishEvent("stop", Usage(3, 2))


class Source:
    """A generation that a test steers and that knows how it ended."""

    def __init__(self, *events: Event | Exception, delay: float = 0.0) -> None:
        self.events = events
        self.delay = delay
        self.closed = False

    async def run(self) -> AsyncGenerator[Event, None]:
        try:
            for event in self.events:
                await asyncio.sleep(self.delay)
                if isinstance(event, Exception):
                    raise event
                yield event
            if self.delay:
                await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)  # as engines may need a moment
            self.closed = True


async def test_events_come_as_they_are_ready_with_their_index() -> None:
    slow, fast = Source(TextEvent("a"), END, delay=0.01), Source(TextEvent("b"), END)
    async with aclosing(side_by_side([slow.run(), fast.run()])) as events:
        seen = [await anext(events) for _ in range(4)]
    assert seen == [(1, TextEvent("b")), (1, END), (0, TextEvent("a")), (0, END)]
    assert slow.closed


@pytest.mark.parametrize("count", [1, 3])
async def test_all_events_come_and_then_the_end(count: int) -> None:
    sources = [Source(TextEvent(str(index)), END) for index in range(count)]
    seen = [each async for each in side_by_side([source.run() for source in sources])]
    assert sorted(index for index, _ in seen) == sorted([*range(count)] * 2)
    assert all(source.closed for source in sources)


async def test_one_failure_ends_all() -> None:
    sources = [
        Source(TextEvent("a"), delay=0.001),
        Source(TextEvent("b"), EngineFailureError("broken"), delay=0.005),
    ]
    with pytest.raises(EngineFailureError, match="broken"):
        _ = [each async for each in side_by_side([source.run() for source in sources])]
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_closes_all(count: int) -> None:
    sources = [Source(TextEvent("a"), delay=0.001) for _ in range(count)]
    events = side_by_side([source.run() for source in sources])
    await anext(events)
    await events.aclose()
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_cancelling_the_reader_closes_all(count: int) -> None:
    sources = [Source(TextEvent("a"), delay=0.001) for _ in range(count)]

    async def read() -> None:
        async with aclosing(side_by_side([source.run() for source in sources])) as events:
            async for _ in events:
                pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert all(source.closed for source in sources)


def test_a_choice_passes_text_and_tokens_on() -> None:
    choice = Choice(None)
    token = TokenLogprob(5, -0.5)
    assert choice.take(TextEvent("a", (token,))) == Delta("a", (), (token,))
    assert choice.finish_reason is None
    assert not choice.take(END)
    assert choice.finish_reason == "stop"
    assert choice.usage == END.usage


@pytest.mark.parametrize(("reason", "told"), [("stop", "tool_calls"), ("length", "length")])
def test_a_choice_with_calls_ends_with_them_unless_it_was_cut(reason: str, told: str) -> None:
    choice = Choice(ToolSplitter(HERMES, ["now"], parallel=True))
    assert not choice.take(TextEvent("<tool_call>"))
    assert not choice.take(TextEvent('{"name": "now"}'))
    delta = choice.take(FinishEvent(reason, Usage(1, 1)))  # type: ignore[arg-type]
    assert delta.calls == (ToolCall("now", "{}"),)
    assert choice.calls == 1
    assert choice.finish_reason == told
