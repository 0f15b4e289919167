"""Stop strings at every way to cut a text into pieces."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.stop import StopMatcher


def pushed(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


def reference(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """Read character by character; cut where a stop string is first complete."""
    for end in range(1, len(text) + 1):
        if complete := [s for s in stops if text[:end].endswith(s)]:
            return text[: end - max(map(len, complete))], True
    return text, False


few_letters = st.text("ab\n你", max_size=25)
stop_lists = st.lists(st.text("ab\n你", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(deadline=None)
@given(few_letters, stop_lists, st.data())
def test_result_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert pushed(stops, pieces) == reference(stops, text)


@settings(deadline=None)
@given(few_letters, stop_lists)
def test_text_is_held_back_only_while_it_may_become_a_stop_string(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for at, character in enumerate(text, start=1):
        out += matcher.push(character)
        if matcher.matched:
            break
        held = text[len(out) : at]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopMatcher(())
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""


def test_beginning_of_a_stop_string_comes_out_at_the_end() -> None:
    assert pushed(["END"], ["the E", "N"]) == ("the EN", False)


def test_stop_string_across_pieces_is_cut_with_its_beginning() -> None:
    assert pushed(["END"], ["the E", "N", "D of it"]) == ("the ", True)


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("ax b") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
