"""The SSE framer gives the same events for the same bytes, however the network cuts them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.targets.sse import MAX_EVENT_BYTES, EventTooLargeError, SseFramer

lines = st.one_of(
    st.text(alphabet="ab:é中😀 {}", max_size=12).map(lambda t: f"data: {t}"),
    st.text(alphabet="ab é中", max_size=8).map(lambda t: f": {t}"),
    st.sampled_from(["event: error", "event:x", "id: 7", "retry: 10", "data", "data:x", "junk"]),
)
blocks = st.lists(lines, min_size=1, max_size=4)


def render(parts: list[list[str]], eols: list[str]) -> bytes:
    count = 0
    text = ""
    for block in parts:
        for line in [*block, ""]:
            text += line + eols[count % len(eols)]
            count += 1
    return text.encode()


def expected(parts: list[list[str]]) -> list[tuple[bytes | None, bytes]]:
    events = []
    for block in parts:
        data, name = [], ""
        for line in block:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                data.append(value)
            elif field == "event":
                name = value
        events.append(("\n".join(data).encode() if data else None, name.encode()))
    return events


def split(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(stream) + 1) for c in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.lists(blocks, min_size=1, max_size=6),
    st.lists(st.sampled_from(["\n", "\r\n", "\r"]), min_size=1, max_size=5),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_events_do_not_depend_on_where_the_bytes_are_cut(
    parts: list[list[str]], eols: list[str], cuts: list[int]
) -> None:
    # A CR line end before an LF line end on an empty line would read as one CRLF.
    if "\r" in eols and "\n" in eols:
        eols = ["\r\n" if eol == "\n" else eol for eol in eols]
    stream = render(parts, eols)
    framer = SseFramer()
    events = [event for piece in split(stream, cuts) for event in framer.feed(piece)]
    found = [(e.data, e.event) for e in events if e.raw.strip(b"\r\n")]
    assert found == expected(parts)
    raw = b"".join(e.raw for e in events)
    assert raw in (stream, stream[:-1])  # the LF of a final CRLF may come after the event


@given(st.lists(blocks, min_size=1, max_size=3), st.sampled_from(["\n", "\r\n", "\r"]))
def test_every_single_byte_split_gives_the_same_events(parts: list[list[str]], eol: str) -> None:
    stream = render(parts, [eol])
    framer = SseFramer()
    events = [event for byte in stream for event in framer.feed(bytes([byte]))]
    assert [(e.data, e.event) for e in events if e.raw.strip()] == expected(parts)


def test_an_event_is_given_as_soon_as_its_last_byte_is_there() -> None:
    framer = SseFramer()
    assert framer.feed(b"data: a\r\n\r") != []
    assert framer.feed(b"\ndata: b\r\n") == []
    (event,) = framer.feed(b"\r\n")
    assert event.data == b"b"
    assert event.raw == b"\ndata: b\r\n\r\n"


def test_a_byte_order_mark_is_passed_on_but_not_read() -> None:
    (event,) = SseFramer().feed(b"\xef\xbb\xbfdata: x\n\n")
    assert event.data == b"x"
    assert event.raw.startswith(b"\xef\xbb\xbf")


def test_a_block_without_data_has_none() -> None:
    (event,) = SseFramer().feed(b": ping\n\n")
    assert event.data is None


def test_an_endless_line_is_refused_before_it_fills_the_memory() -> None:
    framer = SseFramer()
    for _ in range(MAX_EVENT_BYTES // 65536):
        framer.feed(b"x" * 65536)
    with pytest.raises(EventTooLargeError):
        framer.feed(b"x")
