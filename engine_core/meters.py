"""What an engine counts about itself, readable from any thread at any time."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import psutil

from engine_core.types import EngineStats

RATE_WINDOW_SECONDS = 10.0
_BUCKET_SECONDS = 0.1

Ending = Literal["finished", "cancelled", "failed"]


class TokenRate:
    """Tokens per second over the last `RATE_WINDOW_SECONDS`, in buckets of a tenth of a second.

    Not safe for several threads; `Meters` guards it.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[tuple[float, int]] = deque()  # (begin, tokens)
        self._sum = 0

    def add(self, tokens: int = 1) -> None:
        """Count tokens that were generated now."""
        now = self._clock()
        if self._buckets and now - self._buckets[-1][0] < _BUCKET_SECONDS:
            begin, before = self._buckets[-1]
            self._buckets[-1] = (begin, before + tokens)
        else:
            self._forget(now)
            self._buckets.append((now, tokens))
        self._sum += tokens

    def per_second(self) -> float:
        """Return the mean over the window."""
        self._forget(self._clock())
        return self._sum / RATE_WINDOW_SECONDS

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0][0] > RATE_WINDOW_SECONDS:
            self._sum -= self._buckets.popleft()[1]


class Meters:
    """Counters of one engine. An accepted request ends exactly once, in one of three ways."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rate = TokenRate()
        self._began = time.monotonic()
        self._process = psutil.Process()
        self._tokens = 0
        self._cached = 0
        self._requests = 0
        self._cancelled = 0
        self._failed = 0

    def accepted(self) -> None:
        """Count a request that was let in."""
        with self._lock:
            self._requests += 1

    def generated(self, tokens: int = 1) -> None:
        """Count tokens."""
        with self._lock:
            self._tokens += tokens
            self._rate.add(tokens)

    def cached(self, tokens: int) -> None:
        """Count prompt tokens that did not have to be computed."""
        with self._lock:
            self._cached += tokens

    def ended(self, how: Ending) -> None:
        """Count how an accepted request ended."""
        with self._lock:
            self._cancelled += how == "cancelled"
            self._failed += how == "failed"

    def rss_bytes(self) -> int:
        """Return the process's resident memory."""
        return int(self._process.memory_info().rss)

    def read(
        self,
        *,
        model: str,
        running: int,
        waiting: int,
        kv_used_bytes: int,
        kv_total_bytes: int,
        preempted_total: int,
        memory: dict[str, int],
        details: dict[str, str | int | float | bool],
    ) -> EngineStats:
        """Return a reading together with what only the engine knows. Takes about 20 µs."""
        rss = self.rss_bytes()
        with self._lock:
            return EngineStats(
                model=model,
                running=running,
                waiting=waiting,
                kv_used_bytes=kv_used_bytes,
                kv_total_bytes=kv_total_bytes,
                rss_bytes=rss,
                tokens_per_second=self._rate.per_second(),
                generated_tokens_total=self._tokens,
                requests_total=self._requests,
                cancelled_total=self._cancelled,
                failed_total=self._failed,
                cached_prompt_tokens_total=self._cached,
                preempted_total=preempted_total,
                uptime_seconds=time.monotonic() - self._began,
                memory=memory,
                details=details,
            )
