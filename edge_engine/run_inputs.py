"""The small inputs of one run of an emitted graph, and what they must be for exact numbers.

A token's numbers must not depend on company: not on how its prompt was cut into chunks, nor on who
else is in the run. On the CPU all kernels of a graph are exact in that sense, bit for bit, but one:
GroupQueryAttention multiplies a single query by other kernels than two and more (with one row,
MLAS's SGEMM adds up in another order). So every sequence takes part in attention with an even
number of queries: an odd chunk, a decode step's single token above all, repeats its last token.
The repeat is dropped, and what it leaves in the cache lies one place behind the sequence, where the
next token will be written. Even, and not just two or more, because long chunks are cut into blocks
of queries, and no block may be left with one.

What this buys: keys and values of a generated token equal those that a prompt with the same tokens
leaves, so that any prefix may be used again. What it costs: about a tenth of the time of attention
in a decode step.

Attention over int8 keys and values computes every query by itself, so there the repeat only fills
the table, which keeps a decode step out of the kernel that spreads a single query over many threads.

Without `query_seqlens` several sequences can only be in one run with a single query each. Then
generated tokens are computed that way, always, and prompts with an even number of queries, always.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from edge_engine.manifest import KvPrecision

SLACK = 1
"""Places of a slot beyond its context window: the repeat of the very last token needs one."""


class Row(Protocol):
    """What one sequence computes in one step; see `engine_core.scheduler.StepRow`."""

    @property
    def place(self) -> int:
        """Its slot."""
        ...

    @property
    def begin(self) -> int:
        """Tokens that are in the slot already."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """What follows them."""
        ...

    @property
    def wants_logits(self) -> bool:
        """Whether logits are asked for after the last token."""
        ...

    @property
    def generated(self) -> bool:
        """Whether the row is one token that was drawn, and no part of a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """A `Row` that asks for nothing."""

    place: int
    begin: int
    tokens: Sequence[int]
    wants_logits: bool = False
    generated: bool = False


@dataclass(frozen=True, slots=True)
class RunShape:
    """Everything about a run that decides the shapes of its inputs.

    Args:
        first: The first slot that the run sees.
        slots: How many slots it sees; those without a row are left alone.
        rows: How many of them compute something.
        tokens: How many tokens each of those computes.
        queries: Places that each has in attention's table: `tokens`, or one more.
        logits: Rows of logits: one for each row that wants them, or one for every token.
    """

    first: int
    slots: int
    rows: int
    tokens: int
    queries: int
    logits: int

    @classmethod
    def of(cls, rows: Sequence[Row], *, ragged: bool, logits: int) -> Self:
        """Return the shape of a run.

        Args:
            rows: What it computes; all have as many tokens.
            ragged: Whether the graph has `query_seqlens`.
            logits: Rows of logits.
        """
        places = [row.place for row in rows]
        first = min(places)
        tokens = len(rows[0].tokens)
        alone = rows[0].generated and not ragged
        return cls(
            first=first,
            slots=max(places) + 1 - first,
            rows=len(rows),
            tokens=tokens,
            queries=1 if alone else tokens + tokens % 2,
            logits=logits,
        )


class RunInputs:
    """The inputs of runs of one shape, filled in place.

    Args:
        shape: The shape.
        capacity: Places of a slot.
        ragged: Whether the graph has `query_seqlens`.
        kv: What its keys and values are kept in.
    """

    def __init__(
        self, shape: RunShape, *, capacity: int, ragged: bool, kv: KvPrecision = "float32"
    ) -> None:
        self._shape = shape
        self._ragged = ragged
        # How many of a sequence's places count; without `query_seqlens` all do.
        self._claimed = shape.tokens if ragged and kv == "int8" else shape.queries
        count = shape.rows * shape.tokens
        self._ids = np.zeros(count, np.int64)
        self._attention_rows = np.zeros((shape.slots, shape.queries), np.int64)
        self._packed_rows = np.zeros(count, np.int64)
        self._logit_rows = np.arange(shape.logits)
        self._lengths = np.zeros(shape.slots, np.int32)
        self._total = np.array(capacity, np.int32)
        self._queries = np.zeros(shape.slots, np.int32)
        self._steps = np.arange(shape.tokens)
        # Behind the last token its repeat.
        self._places = np.minimum(np.arange(shape.queries), shape.tokens - 1)

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The arrays by the names of the graph's inputs."""
        found: dict[str, NDArray[np.generic]] = {
            "input_ids": self._ids,
            "attention_rows": self._attention_rows,
            "packed_rows": self._packed_rows,
            "logit_rows": self._logit_rows,
            "seqlens_k": self._lengths,
            "total_sequence_length": self._total,
        }
        return found | {"query_seqlens": self._queries} if self._ragged else found

    def fill(self, rows: Sequence[Row], ends: Sequence[int]) -> None:
        """Say what the next run computes.

        Args:
            rows: As many as the shape has, each with as many tokens.
            ends: For every slot the run sees, how many of its places may hold something of worth.
        """
        shape = self._shape
        if self._ragged:
            # A slot of length 1 and without a query is neither read nor written.
            self._lengths.fill(0)
            self._queries.fill(0)
        else:
            # A slot without a row computes a query all the same: it lands behind the slot's end.
            self._lengths[:] = ends
        asked = 0
        for index, row in enumerate(rows):
            slot = row.place - shape.first
            begin = index * shape.tokens
            end = begin + shape.tokens
            self._ids[begin:end] = row.tokens
            np.add(self._places, begin, out=self._attention_rows[slot])
            np.add(self._steps, slot * shape.queries, out=self._packed_rows[begin:end])
            self._lengths[slot] = row.begin + self._claimed - 1
            self._queries[slot] = self._claimed
            if row.wants_logits and shape.logits < len(self._ids):
                self._logit_rows[asked] = end - 1
                asked += 1
        if not self._ragged:
            self._total[...] = self._lengths.max() + 1
