"""Amounts of memory as options of an engine: as a person wrote them, and whether they can be."""

from dataclasses import dataclass

from engine_core.byte_sizes import format_bytes, parse_bytes
from engine_core.machine_limits import memory_limit

STEP_LEAST = 2**14
"""Bytes below which a step's memory is refused before any model is read. One token of a model of two
layers and 64 numbers takes 6 KiB, of the built-in model, whose layers are narrow, 0.5 to 1 MiB."""


@dataclass(frozen=True, slots=True)
class MemorySize:
    """A size such as `768MiB`, and its bytes."""

    text: str
    bytes: int

    @classmethod
    def from_text(cls, text: str) -> "MemorySize":
        """Parse what a person wrote.

        Raises:
            ValueError: as `parse_bytes` does.
        """
        return cls(text, parse_bytes(text))

    def __str__(self) -> str:
        """Return it as it was written."""
        return self.text

    def fault(self, *, least: int = 0) -> str | None:
        """Return why an engine on this machine cannot have this limit, or None if it can.

        Args:
            least: Bytes that it must be at least.
        """
        if self.bytes < least:
            return f"{self} is too little for any model; give at least {format_bytes(least)}"
        most = memory_limit()
        if self.bytes > most:
            # Rounded down, so that following the advice helps.
            return (
                f"{self} is more than this machine or its control group has; give at most "
                f"{most // 2**20}MiB"
            )
        return None
