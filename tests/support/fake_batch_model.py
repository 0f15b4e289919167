"""A scripted model for tests of the batch engine. It notices steps that do not fit its memory."""

import asyncio
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edge_engine.slots import SlotSpace
from engine_core.batch_model import StepSizes
from engine_core.errors import StepMemoryError
from engine_core.fake_engine import EOS, ByteTokenizer
from engine_core.scheduler import StepRow

Hook = Callable[[list[StepRow]], None]
WINDOW = 2000
BUDGET = 64
PROMPT_TOKEN = 0  # in no reply


class FakeBatchModel:
    """Answers every sequence with the scripted bytes; each step may wait for a gate or fail.

    Args:
        reply: What every answer is.
        slots: Sequences that fit.
        most_tokens: Tokens of a step beyond which its memory does not suffice.
    """

    context_window = WINDOW
    kv_token_bytes = 10
    details: dict[str, str | int | float | bool] = {"kind": "fake"}  # noqa: RUF012

    def __init__(
        self, reply: bytes = b"Hello there.", *, slots: int = 1, most_tokens: int = WINDOW
    ) -> None:
        self.reply = [*reply, EOS]
        self.space = SlotSpace(slots)
        self.kv_total_bytes = slots * WINDOW * 10
        self.most_tokens = most_tokens
        self.step_sizes = StepSizes(chunk=32, budget=BUDGET, quiet_budget=BUDGET)
        self.slots: list[list[int]] = [[] for _ in range(slots)]
        self.steps: list[list[int]] = []
        self.before_step: Hook = lambda _: None
        self.relieved: list[int] = []
        self.closed = False
        self.threads: set[int] = set()

    def memory(self) -> dict[str, int]:
        return {"kv": sum(map(len, self.slots)) * 10}

    def step(self, rows: list[StepRow]) -> NDArray[np.float32]:
        self.before_step(rows)
        self.threads.add(threading.get_ident())
        if sum(len(row.tokens) for row in rows) > self.most_tokens:
            raise StepMemoryError("too much for the fake")
        self.steps.append([len(row.tokens) for row in rows])
        logits = []
        for row in rows:
            held = self.slots[row.place]
            assert row.begin <= len(held)
            held[row.begin :] = row.tokens
            if row.wants_logits:
                assert held == row.sequence.tokens
                generated = sum(token != PROMPT_TOKEN for token in held)
                logits.append(np.zeros(ByteTokenizer.vocab_size, np.float32))
                logits[-1][self.reply[min(generated, len(self.reply) - 1)]] = 50
        return np.array(logits, np.float32).reshape(-1, ByteTokenizer.vocab_size)

    def relieve(self, level: int) -> None:
        self.threads.add(threading.get_ident())
        self.relieved.append(level)

    def close(self) -> None:
        self.closed = True


class Gate:
    """Stops the model before each step until it is let through."""

    def __init__(self, model: FakeBatchModel) -> None:
        self._permits = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)
        model.before_step = self._wait

    def _wait(self, _: list[StepRow]) -> None:
        self.reached.release()
        assert self._permits.acquire(timeout=10)

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.acquire, timeout=10)

    def open(self, times: int = 1) -> None:
        self._permits.release(times)
