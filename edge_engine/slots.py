"""Slots: contiguous room for keys and values of one sequence each, kept for whoever comes back.

A finished sequence's tokens stay in its slot. A new one goes to the free slot where its common
prefix saves most and begins there, so that the next turn of a conversation computes only what is
new.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_core.scheduler import Placement


@dataclass(frozen=True, slots=True)
class _Slot:
    busy: bool = False
    salt: str = ""
    kept: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    released: int = 0
    """When it was left, in releases; 0 for never."""


class SlotSpace:
    """A `KVSpace` of equal slots.

    Args:
        slots: How many sequences fit.
        keeps_generated: Whether drawn tokens stay as well as prompts. Not where their keys and
            values differ, in the last bits, from those that the same tokens have in a prompt:
            answers would depend on what happens to be in a slot.
    """

    def __init__(self, slots: int, *, keeps_generated: bool = True) -> None:
        self._keeps_generated = keeps_generated
        self._slots = [_Slot() for _ in range(slots)]
        self._releases = 0

    @property
    def free(self) -> int:
        """Slots without a sequence."""
        return sum(not slot.busy for slot in self._slots)

    @property
    def kept_tokens(self) -> int:
        """Tokens that lie in free slots for whoever comes back."""
        return sum(len(slot.kept) for slot in self._slots if not slot.busy)

    def admit(self, tokens: list[int], salt: str) -> Placement | None:
        """Take the free slot with the best balance; see `engine_core.scheduler.KVSpace`.

        What is saved are the tokens in common. What is lost are the others that the slot keeps,
        times the chance that someone comes back for them, taken as 1 / (1 + age) with an age of 1
        when as many sequences have left as there are slots. All chats begin with the same few
        tokens: without the loss, every new one would wipe out a long conversation to save them.
        """
        if not self.free:  # the first of the waiting list asks before every step
            return None
        # At least one token must be computed, since its logits choose the next one.
        wanted = np.asarray(tokens[:-1], np.int64)
        gains: list[tuple[float, int, int]] = []
        for index, slot in enumerate(self._slots):
            if slot.busy:
                continue
            common = _common(slot.kept, wanted) if slot.salt == salt else 0
            age = (self._releases - slot.released) / len(self._slots)
            gain = common - (len(slot.kept) - common) / (1 + age)
            gains.append((gain, index, common))
        # Among equals the first slot, since a step spans the slots up to the last busy one.
        _, index, cached = max(gains, key=lambda entry: entry[0])
        self._slots[index] = _Slot(busy=True, salt=salt)
        return Placement(index, cached)

    def grow(self, place: int, length: int) -> bool:  # noqa: ARG002
        """Return that there is room: a slot has it from the beginning."""
        return True

    def release(self, place: int, tokens: list[int], generated: int) -> None:
        """Free a slot; its tokens stay."""
        if not self._keeps_generated:
            tokens = tokens[: len(tokens) - generated]
        self._releases += 1
        self._slots[place] = _Slot(
            salt=self._slots[place].salt,
            kept=np.asarray(tokens, np.int64),
            released=self._releases,
        )

    def forget(self) -> list[int]:
        """Drop what free slots keep; return those that kept something."""
        dropped = [i for i, slot in enumerate(self._slots) if not slot.busy and len(slot.kept)]
        for index in dropped:
            self._slots[index] = _Slot()
        return dropped


def _common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Return how many leading tokens are the same."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
