"""The requests being answered: each has one timer, so that a drain can wait for them or end them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class InFlight:
    """Counts requests and can end them all."""

    def __init__(self) -> None:
        self.draining = False
        """Set when the daemon is stopping: no new request is taken."""
        self.cutting = False
        """Set when the drain is over: what still runs is ended."""
        self._timers: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._timers)

    @contextmanager
    def hold(self, timer: asyncio.Timeout) -> Iterator[None]:
        """Count a request while it runs under `timer`."""
        self._timers.add(timer)
        self._idle.clear()
        try:
            yield
        finally:
            self._timers.discard(timer)
            if not self._timers:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return once no request runs."""
        await self._idle.wait()

    def cut(self) -> None:
        """Let every timer fire now: requests end with an error their clients can read."""
        self.cutting = True
        now = asyncio.get_running_loop().time()
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(now)
