"""Answers: text, log probabilities that go with it, and the reason for the end."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.answer import Answer, Draw
from engine_core.fake_engine import EOS, ByteTokenizer
from engine_core.stop import StopMatcher
from engine_core.types import GenerationRequest, TextEvent, TokenLogprob, Usage


def answer_to(
    max_tokens: int = 1000, stop: Sequence[str] = (), prompt: int = 3, window: int = 10_000
) -> Answer:
    request = GenerationRequest(
        id="r", prompt_ids=(0,) * prompt, max_tokens=max_tokens, stop=tuple(stop), logprobs=0
    )
    return Answer(request, ByteTokenizer(), window)


def push_all(answer: Answer, tokens: Sequence[int]) -> list[TextEvent]:
    events = []
    for at, token in enumerate(tokens):
        event = answer.push(Draw(token, TokenLogprob(token, -float(at))))
        if event:
            events.append(event)
        if answer.finish_reason:
            break
    return events


def spoken(events: Sequence[TextEvent]) -> str:
    return "".join(event.text for event in events)


def reported(events: Sequence[TextEvent]) -> list[int]:
    """Return the places of the tokens whose log probabilities were told."""
    return [-int(each.logprob) for event in events for each in event.logprobs]


def test_each_event_has_the_log_probabilities_of_its_text() -> None:
    events = push_all(answer_to(), [*b"Hi", EOS])
    assert events == [
        TextEvent("H", (TokenLogprob(ord("H"), 0.0),)),
        TextEvent("i", (TokenLogprob(ord("i"), -1.0),)),
    ]


def test_without_log_probabilities_events_have_none() -> None:
    assert answer_to().push(Draw(ord("a"))) == TextEvent("a")


def test_tokens_of_a_character_are_reported_when_it_is_whole() -> None:
    events = push_all(answer_to(), [*"a你b".encode(), EOS])
    assert [(event.text, len(event.logprobs)) for event in events] == [
        ("a", 1),
        ("你", 3),
        ("b", 1),
    ]


def test_tokens_wait_with_text_that_may_belong_to_a_stop_string() -> None:
    events = push_all(answer_to(stop=["<end>"]), b"a<en!")
    assert [(event.text, len(event.logprobs)) for event in events] == [("a", 1), ("<en!", 4)]


def test_tokens_that_a_stop_string_cuts_are_not_reported() -> None:
    answer = answer_to(stop=["<end>"])
    events = push_all(answer, b"ab<end>")
    assert (spoken(events), reported(events), answer.finish_reason) == ("ab", [0, 1], "stop")


def test_the_end_of_turn_is_counted_and_not_reported() -> None:
    answer = answer_to()
    events = push_all(answer, [ord("a"), EOS])
    assert (spoken(events), reported(events), answer.finish_reason) == ("a", [0], "stop")
    assert answer.usage(2) == Usage(3, 2, cached_tokens=2)


def test_a_character_that_the_limit_cuts_is_neither_said_nor_reported() -> None:
    answer = answer_to(max_tokens=3)
    events = push_all(answer, "a你".encode())
    assert (spoken(events), reported(events), answer.finish_reason) == ("a", [0], "length")


@pytest.mark.parametrize(("window", "tokens"), [(5, 2), (100, 4)])
def test_the_answer_ends_at_the_limit_or_the_window(window: int, tokens: int) -> None:
    answer = answer_to(max_tokens=4, window=window)
    assert len(spoken(push_all(answer, b"abcdefgh"))) == tokens
    assert answer.finish_reason == "length"


def test_what_was_held_back_comes_out_at_the_end() -> None:
    events = push_all(answer_to(stop=["<end>"]), [*b"a<en", EOS])
    assert (spoken(events), reported(events)) == ("a<en", [0, 1, 2, 3])


texts = st.text("ab<é你", max_size=20)
stop_lists = st.lists(st.text("ab<é你", min_size=1, max_size=3), max_size=3)


@given(texts, stop_lists, st.integers(1, 60))
def test_reported_tokens_are_those_whose_text_begins_in_the_answer(
    text: str, stops: list[str], max_tokens: int
) -> None:
    answer = answer_to(max_tokens=max_tokens, stop=stops)
    events = push_all(answer, [*text.encode(), EOS])
    matcher = StopMatcher(stops)
    whole = text.encode()[:max_tokens].decode(errors="ignore")
    assert spoken(events) == matcher.push(whole) + matcher.flush()
    # With one token for each byte, these are the bytes of the answer.
    assert reported(events) == list(range(len(spoken(events).encode())))
    for event in events:
        assert event.text
        if not stops:
            assert bytes(each.token for each in event.logprobs).decode() == event.text
