"""Stop strings, found in text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Cuts a growing text at the first stop string and never lets go a part of one.

    The first stop string is the one that is complete first, and of those that are complete at the
    same character the one that began first. So the result does not depend on how the text was cut
    into pieces.

    Args:
        stops: Non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched = False
        """Whether a stop string was found; nothing comes out after that."""

    def push(self, text: str) -> str:
        """Take the next piece; return what can no longer belong to a stop string."""
        if self.matched:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.matched = True
            self._held = ""
            return text[: min(found)[1]]
        keep = len(text) - self._possible_beginning(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return what was held back; the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
