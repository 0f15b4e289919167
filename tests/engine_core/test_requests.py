"""What a body of each endpoint asks of an engine."""

import json
from typing import Any

import pytest

from engine_core.errors import InvalidRequestError
from engine_core.fake_engine import FakeEngine
from engine_core.grammar import Grammar
from engine_core.requests import Ask, read_chat, read_completion
from engine_core.types import Sampling
from engine_core.urgency import Urgency

TOOL = {"type": "function", "function": {"name": "now"}}


def chat(**fields: Any) -> Ask:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return read_chat(json.dumps(body).encode(), FakeEngine(), Urgency())


def completion(**fields: Any) -> Ask:
    body = {"model": "m", "prompt": "The capital is", **fields}
    return read_completion(json.dumps(body).encode(), FakeEngine(), Urgency())


def test_a_plain_completion_continues_its_prompt_and_a_chat_answer_begins_a_text() -> None:
    assert completion().generations[0].continues
    assert not chat().generations[0].continues


def test_choices_differ_in_their_seeds_and_ids_alone() -> None:
    alone = chat(seed=5).generations[0]
    first, second, third = chat(seed=5, n=3).generations
    assert first.sampling == alone.sampling
    assert [each.sampling.seed for each in (first, second, third)] == [5, 6, 7]
    assert len({first.id, second.id, third.id}) == 3
    assert {each.prompt_ids for each in (first, second, third)} == {alone.prompt_ids}


def test_without_a_seed_no_choice_has_one() -> None:
    assert [each.sampling.seed for each in chat(n=2).generations] == [None, None]


def test_what_the_client_leaves_out_has_openais_defaults() -> None:
    assert chat(temperature=None).generations[0].sampling == Sampling()
    assert chat().generations[0].max_tokens == FakeEngine().context_window
    assert completion().generations[0].max_tokens == 16


def test_every_way_of_drawing_tokens_arrives() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 9,
    }
    biased = Sampling(**given, logit_bias=((3, -100.0), (70, 1.5)))
    for ask in (chat, completion):
        generation = ask(**given, logit_bias={"3": -100, "70": 1.5}).generations[0]
        assert generation.sampling == biased


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_log_probabilities_of_a_chat(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).generations[0].logprobs == logprobs


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_log_probabilities_of_a_completion(logprobs: int | None) -> None:
    assert completion(logprobs=logprobs).generations[0].logprobs == logprobs


def test_the_newer_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=6).generations[0].max_tokens == 6


def test_stop_is_a_text_or_several() -> None:
    assert chat(stop="a").generations[0].stop == ("a",)
    assert chat(stop=["a", "b"]).generations[0].stop == ("a", "b")


def test_best_of_as_many_as_asked_for_is_all_of_them() -> None:
    assert len(completion(n=2, best_of=2).generations) == 2
    with pytest.raises(InvalidRequestError, match="'n'"):
        completion(best_of=2)


def test_a_response_format_is_a_grammar_of_every_choice() -> None:
    ask = chat(response_format={"type": "json_object"}, n=2)
    assert {each.grammar for each in ask.generations} == {Grammar("json_object")}
    assert ask.tools is None


def test_tools_have_their_own_grammar() -> None:
    ask = chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})
    assert ask.tools is not None
    assert ask.grammar == ask.tools.grammar
    assert chat(tools=[TOOL]).grammar is None


def test_the_model_sees_the_tools_it_may_call_and_no_others() -> None:
    plain = chat().generations[0].prompt_ids
    assert bytes(chat(tools=[TOOL]).generations[0].prompt_ids) == b"tool: now\n" + bytes(plain)
    assert chat(tools=[TOOL], tool_choice="none").generations[0].prompt_ids == plain


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers_on_every_path() -> None:
    long = "x" * 5000
    for ask, fields in (
        (chat, {"messages": [{"role": "user", "content": long}]}),
        (chat, {"messages": [{"role": "user", "content": long}], "tools": [TOOL], "n": 2}),
        (completion, {"prompt": long}),
        (completion, {"prompt": [65] * 5000, "n": 2}),
    ):
        with pytest.raises(InvalidRequestError, match=r"50\d\d tokens.* 4096 tokens") as refusal:
            ask(**fields)
        assert refusal.value.code == "context_length_exceeded"
