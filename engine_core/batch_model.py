"""What the batch engine steps, and what becomes of a step that memory does not suffice for."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_core.errors import StepMemoryError
from engine_core.scheduler import KVSpace, Sequence, StepRow


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How many tokens go into a step; see `engine_core.scheduler.Scheduler`."""

    chunk: int
    budget: int
    quiet_budget: int


Choice = NDArray[np.float32] | int
"""What a sequence's next token is drawn from, logits `[vocab]`, or that token's id."""


class BatchModel(Protocol):
    """A decoder that steps many sequences. Used by one thread; the properties by any."""

    @property
    def context_window(self) -> int:
        """Most tokens of one sequence."""
        ...

    @property
    def space(self) -> KVSpace:
        """Where sequences are placed."""
        ...

    @property
    def step_sizes(self) -> StepSizes:
        """How large its steps should be."""
        ...

    @property
    def kv_total_bytes(self) -> int:
        """Room for keys and values."""
        ...

    @property
    def kv_token_bytes(self) -> int:
        """What one token takes of it."""
        ...

    @property
    def details(self) -> dict[str, str | int | float | bool]:
        """What only this model has to say in stats: device, precision, provider."""
        ...

    def memory(self) -> dict[str, int]:
        """Return where the process's bytes are, in parts; cheap, from any thread."""
        ...

    def step(self, rows: list[StepRow]) -> Iterable[Choice]:
        """Compute tokens; return logits, or a drawn token, for each row that wants logits.

        A model may draw for sequences that have a `draw`, and for no others. The logits may be
        overwritten by the next call. A step that raises has changed nothing before the `begin` of
        any row.

        Raises:
            StepMemoryError: the step needs more memory than there is; a smaller one may not.
        """
        ...

    def relieve(self, level: int) -> None:
        """Give memory back; see `engine_core.types.Engine.pressure`."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


def compute(
    model: BatchModel, rows: list[StepRow]
) -> tuple[list[tuple[StepRow, Choice]], list[Sequence]]:
    """Step, in halves where memory does not suffice for the whole.

    Returns:
        The rows that want logits with their choices, and the sequences that do not fit at all.
    """
    try:
        choices = model.step(rows)
    except StepMemoryError:
        halves = _halves(rows)
        if halves is None:
            return [], [rows[0].sequence]
        first, without = compute(model, halves[0])
        # The second half of a chunk cannot follow a first half that failed.
        rest = [row for row in halves[1] if row.sequence not in without]
        # The next step uses the memory of the logits again.
        kept = [(row, c if isinstance(c, int) else c.copy()) for row, c in first]
        second, more = compute(model, rest) if rest else ([], [])
        return kept + second, without + more
    return list(zip((row for row in rows if row.wants_logits), choices, strict=True)), []


def _halves(rows: list[StepRow]) -> tuple[list[StepRow], list[StepRow]] | None:
    """Split a step between its rows, or its only row between its tokens."""
    if len(rows) > 1:
        middle = len(rows) // 2
        return rows[:middle], rows[middle:]
    row = rows[0]
    middle = len(row.tokens) // 2
    if not middle:
        return None
    head = replace(row, tokens=row.tokens[:middle], wants_logits=False)
    return [head], [replace(row, begin=row.begin + middle, tokens=row.tokens[middle:])]
