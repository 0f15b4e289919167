"""Models that hold one sequence at a time, as the batch engine sees them: a space of one place."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_core.batch_model import StepSizes
from engine_core.scheduler import Placement, StepRow


class StepModel(Protocol):
    """A decoder that holds one sequence. Used by one thread; the properties by any."""

    @property
    def context_window(self) -> int:
        """Most tokens of the sequence."""
        ...

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        ...

    @property
    def details(self) -> dict[str, str | int | float | bool]:
        """What only this model has to say in stats: device, precision, provider."""
        ...

    def memory(self) -> dict[str, int]:
        """Return where the process's bytes are, in parts; cheap, from any thread."""
        ...

    def reset(self) -> None:
        """Forget the sequence and free its keys and values."""
        ...

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens to the sequence; return the logits after the last, shape [vocab].

        The array may be overwritten by the next call.
        """
        ...

    def close(self) -> None:
        """Free the model."""
        ...


class SingleSequenceModel:
    """A `engine_core.batch_model.BatchModel` whose steps have one row.

    Args:
        model: What computes; a sequence is forgotten when the next one begins.
    """

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._space = _OnePlace()
        self.context_window = model.context_window
        self.kv_token_bytes = model.kv_token_bytes
        self.kv_total_bytes = model.kv_token_bytes * model.context_window
        self.details = model.details
        self.step_sizes = StepSizes(chunk=32, budget=32, quiet_budget=32)

    @property
    def space(self) -> "_OnePlace":
        """The one place."""
        return self._space

    def memory(self) -> dict[str, int]:
        """Return where the process's bytes are, as the model knows."""
        return self._model.memory()

    def step(self, rows: list[StepRow]) -> NDArray[np.float32]:
        """Compute one row; return its logits `[1, vocab]`, or none if it does not want them."""
        (row,) = rows
        if row.begin == 0:
            self._model.reset()
        logits = self._model.forward(row.tokens)[None]
        return logits if row.wants_logits else logits[:0]

    def relieve(self, level: int) -> None:  # noqa: ARG002 - there is nothing to choose from
        """Free the keys and values of a sequence that has ended."""
        if self._space.free:
            self._model.reset()

    def close(self) -> None:
        """Free the model."""
        self._model.close()


class _OnePlace:
    """A `KVSpace` for one sequence, which leaves nothing behind."""

    def __init__(self) -> None:
        self.free = 1

    def admit(self, tokens: list[int], salt: str) -> Placement | None:  # noqa: ARG002
        if not self.free:
            return None
        self.free = 0
        return Placement(0, 0)

    def grow(self, place: int, length: int) -> bool:  # noqa: ARG002
        return True

    def release(self, place: int, tokens: list[int], generated: int) -> None:  # noqa: ARG002
        self.free = 1
