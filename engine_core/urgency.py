"""How much a request matters and until when: two headers, the same at the router and at engines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine_core.errors import InvalidRequestError
from engine_core.types import PRIORITIES

CLASS_HEADER = "x-tidegate-class"
"""A name out of `PRIORITIES`."""
DEFAULT_CLASS = "standard"
DEADLINE_HEADER = "x-tidegate-deadline-ms"
"""Whole milliseconds from now, after which the answer is worth nothing."""
_DEADLINE_DIGITS = 9
"""More digits, over eleven days, are a mistake."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """What the two headers say.

    Args:
        request_class: A key of `PRIORITIES`.
        deadline: When the answer is due, in the seconds of `time.monotonic`; None for never.
    """

    request_class: str = DEFAULT_CLASS
    deadline: float | None = None

    @property
    def priority(self) -> int:
        """The value of the class; smaller goes first."""
        return PRIORITIES[self.request_class]

    def headers(self, now: float) -> dict[str, str]:
        """Return the headers for whoever is asked `now`.

        A deadline that has passed on the way has a millisecond left: whoever is asked says then
        that it was missed, and not that the header is wrong.
        """
        headers = {}
        if self.request_class != DEFAULT_CLASS:
            headers[CLASS_HEADER] = self.request_class
        if self.deadline is not None:
            headers[DEADLINE_HEADER] = str(max(1, math.ceil((self.deadline - now) * 1000)))
        return headers


def read_urgency(headers: Mapping[str, str], now: float) -> Urgency:
    """Read the headers of a request that has come `now`, on the clock of `time.monotonic`.

    Raises:
        InvalidRequestError: names the header that is wrong.
    """
    request_class = headers.get(CLASS_HEADER, DEFAULT_CLASS)
    if request_class not in PRIORITIES:
        raise InvalidRequestError(
            f"The header '{CLASS_HEADER}' must be one of {', '.join(PRIORITIES)}.",
            param=CLASS_HEADER,
        )
    milliseconds = headers.get(DEADLINE_HEADER)
    if milliseconds is None:
        return Urgency(request_class)
    if not (
        milliseconds.isascii()
        and milliseconds.isdecimal()
        and len(milliseconds) <= _DEADLINE_DIGITS
        and int(milliseconds) > 0
    ):
        raise InvalidRequestError(
            f"The header '{DEADLINE_HEADER}' must be a whole number of milliseconds above 0.",
            param=DEADLINE_HEADER,
        )
    return Urgency(request_class, now + int(milliseconds) / 1000)
