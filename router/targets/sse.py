"""Server-sent events, cut out of a byte stream that may be split anywhere.

Knows nothing about what the events mean. Follows the WHATWG event-stream grammar: lines end in
LF, CRLF or CR, an empty line ends an event, a line that begins with a colon is a comment, one
space after the field's colon is dropped, several `data` lines are joined by LF.
"""

from dataclasses import dataclass

MAX_EVENT_BYTES = 1 << 20
"""A larger event is a broken or hostile upstream: one token's chunk has a few hundred bytes."""

_BOM = b"\xef\xbb\xbf"


class EventTooLargeError(ValueError):
    """An event passed `MAX_EVENT_BYTES` before it ended."""


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event.

    `raw` is every byte of it, line ends included, so that passing it on changes nothing.
    `data` is None for a block without a `data` field (a comment, a bare `retry`).
    """

    raw: bytes
    data: bytes | None
    event: bytes = b""


class SseFramer:
    """Collects bytes and gives back whole events, each as soon as its last byte is there."""

    __slots__ = ("_after_cr", "_block", "_line_start", "_scan", "_started")

    def __init__(self) -> None:
        self._block = bytearray()
        self._line_start = 0
        self._scan = 0
        self._after_cr = False
        self._started = False

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Take bytes as they came off the network; return the events that they complete.

        What is still unfinished when the stream ends is no event.

        Raises:
            EventTooLargeError: no event ended within `MAX_EVENT_BYTES`.
        """
        if not chunk:
            return []
        self._block += chunk
        if self._after_cr and chunk[0] == 0x0A:
            # The second half of a CRLF whose first half already ended a line.
            self._line_start += 1
            self._scan = self._line_start
        self._after_cr = False
        events = self._cut()
        if len(self._block) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"An event is larger than {MAX_EVENT_BYTES} bytes.")
        return events

    def _cut(self) -> list[SseEvent]:
        block = self._block
        events = []
        event_start = 0
        while (ends := self._line_end()) is not None:
            text_end, next_line = ends
            if text_end == self._line_start:
                events.append(self._event(bytes(block[event_start:next_line])))
                event_start = next_line
            self._line_start = self._scan = next_line
        del block[:event_start]
        self._line_start -= event_start
        self._scan -= event_start
        return events

    def _line_end(self) -> tuple[int, int] | None:
        """Find the next line end: where the text stops and where the next line starts."""
        block = self._block
        lf = block.find(b"\n", self._scan)
        cr = block.find(b"\r", self._scan, lf if lf >= 0 else len(block))
        if cr < 0:
            self._scan = len(block)
            return None if lf < 0 else (lf, lf + 1)
        if cr + 1 == len(block):
            self._after_cr = True
            return cr, cr + 1
        return cr, cr + 2 if block[cr + 1] == 0x0A else cr + 1

    def _event(self, raw: bytes) -> SseEvent:
        text = raw
        if not self._started:
            self._started = True
            text = raw.removeprefix(_BOM)
        data: list[bytes] = []
        event = b""
        for line in text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
            field, _, value = line.partition(b":")
            if field == b"data":
                data.append(value.removeprefix(b" "))
            elif field == b"event":
                event = value.removeprefix(b" ")
        return SseEvent(raw, b"\n".join(data) if data else None, event)
