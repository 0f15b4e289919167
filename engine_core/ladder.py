"""How many sequences may run side by side when others use the device too."""

import re
from dataclasses import dataclass

_RUNG = re.compile(r"(\d{1,3})%:(\d{1,3})%", re.ASCII)


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rungs of (use, share), rising in use: below that use, this share of the sequences runs.

    Both are fractions. Above the last rung one sequence runs at a time.
    """

    rungs: tuple[tuple[float, float], ...]

    @classmethod
    def from_text(cls, text: str) -> "Ladder":
        """Parse what a person wrote, such as `60%:100%, 80%:50%`.

        Raises:
            ValueError: it is no such text; the message is what was expected.
        """
        matches = [_RUNG.fullmatch(part) for part in text.replace(" ", "").split(",")]
        rungs = [(int(match[1]), int(match[2])) for match in matches if match]
        uses, shares = [use for use, _ in rungs], [share for _, share in rungs]
        rising = uses == sorted(set(uses)) and shares == sorted(shares, reverse=True)
        if not all(matches) or not rising or not all(0 < n <= 100 for n in uses + shares):
            raise ValueError(
                "rungs of use and share from 1% to 100%, rising in use and not in share, such as "
                "60%:100%, 80%:50%"
            )
        return cls(tuple((use / 100, share / 100) for use, share in rungs))

    def __str__(self) -> str:
        """Return it as a person would write it."""
        return ", ".join(f"{use:.0%}:{share:.0%}" for use, share in self.rungs)

    def most(self, use: float, sequences: int) -> int:
        """Return how many of `sequences` may run at a use between 0 and 1; at least one."""
        for below, share in self.rungs:
            if use < below:
                return max(1, int(sequences * share + 1e-9))  # 0.29 x 100 is a bit under 29
        return 1


DEFAULT_LADDER = Ladder(((0.6, 1.0), (0.8, 0.5)))
