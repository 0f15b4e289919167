"""The sampler against an implementation that is too simple to be wrong."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_core.errors import EngineFailureError, InvalidRequestError
from engine_core.fake_engine import ByteTokenizer
from engine_core.grammar import Grammar
from engine_core.sampling import Sampler, _nucleus
from engine_core.types import GenerationRequest, Sampling, TokenLogprob

VOCAB = 12


def sampler_of(
    sampling: Sampling, prompt_ids: Sequence[int], vocab_size: int, logprobs: int | None = None
) -> Sampler:
    request = GenerationRequest(
        id="r",
        prompt_ids=tuple(prompt_ids),
        max_tokens=99,
        sampling=sampling,
        logprobs=logprobs,
    )
    return Sampler(request, vocab_size, ByteTokenizer())


def reference_probabilities(
    logits: NDArray[np.float32],
    sampling: Sampling,
    prompt_ids: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> list[float]:
    """Return each token's probability by the definitions, with plain loops and Python floats."""
    scores = [float(x) for x in logits]
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in set(prompt_ids) | set(generated):
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(generated):
        scores[token] -= sampling.presence_penalty
        scores[token] -= generated.count(token) * sampling.frequency_penalty
    best = max(scores)
    weights = {i: math.exp((s - best) / sampling.temperature) for i, s in enumerate(scores)}
    if sampling.top_k:
        least = sorted(scores, reverse=True)[min(sampling.top_k, len(scores)) - 1]
        weights = {i: w for i, w in weights.items() if scores[i] >= least}
    nucleus: set[int] = set()
    reached = 0.0
    for i in sorted(weights, key=lambda i: (-weights[i], i)):
        if nucleus and reached >= sampling.top_p * sum(weights.values()):
            break
        nucleus.add(i)
        reached += weights[i]
    if sampling.top_p < 1:
        weights = {i: w for i, w in weights.items() if i in nucleus}
    weights = {i: w for i, w in weights.items() if w >= sampling.min_p}
    total = sum(weights.values())
    return [weights.get(i, 0.0) / total for i in range(len(scores))]


def drawn_share(
    logits: NDArray[np.float32], sampling: Sampling, draws: int = 4000
) -> NDArray[np.float64]:
    """Return how often each token is drawn when the same logits come back."""
    counts = np.zeros(len(logits))
    sampler = sampler_of(sampling, (), len(logits))
    for _ in range(draws):
        counts[sampler.draw(logits).token] += 1
    return counts / draws


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.35, 0.77, 0.93, 1.0]),
    top_k=st.integers(0, VOCAB + 3),
    min_p=st.sampled_from([0.0, 0.04, 0.33]),
    presence_penalty=st.sampled_from([0.0, -1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4, 1.1]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.7]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.25, 100.0]), max_size=3
    ).map(lambda biases: tuple(biases.items())),
)


@settings(max_examples=300, deadline=None)
@given(
    sampling=samplings,
    steps=st.lists(
        st.lists(
            st.floats(-9, 9, width=32).map(lambda x: round(x, 2)), min_size=VOCAB, max_size=VOCAB
        ),
        min_size=1,
        max_size=4,
    ),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=5),
)
def test_every_drawn_token_is_possible_by_the_definitions(
    sampling: Sampling, steps: list[list[float]], prompt: list[int]
) -> None:
    sampler = sampler_of(sampling, prompt, VOCAB)
    generated: list[int] = []
    for step in steps:
        logits = np.array(step, np.float32)
        expected = reference_probabilities(logits, sampling, prompt, generated)
        token = sampler.draw(logits).token
        assert expected[token] > 0 or _on_the_border(logits, sampling, prompt, generated, token)
        generated.append(token)


def _on_the_border(
    logits: NDArray[np.float32],
    sampling: Sampling,
    prompt: list[int],
    generated: list[int],
    token: int,
) -> bool:
    """Rounding to float32 may decide a tie or a share that meets the limit exactly."""
    nudged = logits.copy()
    nudged[token] += 1e-4
    looser = replace(
        sampling,
        top_p=min(1.0, sampling.top_p + 1e-5),
        min_p=max(0.0, sampling.min_p - 1e-5),
        top_k=sampling.top_k and sampling.top_k + 1,
    )
    return reference_probabilities(nudged, looser, prompt, generated)[token] > 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1),
        Sampling(seed=2, temperature=0.5),
        Sampling(seed=3, top_k=3),
        Sampling(seed=4, top_p=0.8),
        Sampling(seed=5, min_p=0.2),
        Sampling(seed=6, temperature=1.5, top_k=7, top_p=0.9, min_p=0.05),
    ],
)
def test_shares_of_drawn_tokens_match_the_probabilities(sampling: Sampling) -> None:
    logits = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32) * 2
    expected = np.array(reference_probabilities(logits, sampling))
    share = drawn_share(logits, sampling)
    assert set(np.flatnonzero(share)) <= set(np.flatnonzero(expected))
    # Four standard deviations of a share in 4000 draws are at most 0.032.
    np.testing.assert_allclose(share, expected, atol=0.032)


@pytest.mark.parametrize("scale", [0.01, 0.5, 4])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_nucleus_of_a_large_vocabulary_equals_full_sorting(scale: float, top_p: float) -> None:
    logits = np.random.default_rng(1).standard_normal(20_000) * scale
    weights = np.exp(logits - logits.max()).astype(np.float32)
    order = np.argsort(-weights, kind="stable")
    cumulative = np.cumsum(weights[order], dtype=np.float64)
    size = int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1
    got = _nucleus(weights, top_p)
    assert abs(len(got) - size) <= 1  # the two sums round differently
    assert set(got) ^ set(order[:size]) <= {order[size - 1], order[size]}


def test_nucleus_gives_ties_at_its_border_to_lower_ids() -> None:
    assert list(_nucleus(np.ones(8, np.float32), 0.5)) == [0, 1, 2, 3]


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    assert (
        sampler_of(Sampling(temperature=0), (), 4).draw(np.array([1, 3, 3, 2], np.float32)).token
        == 1
    )


def test_greedy_follows_penalties() -> None:
    sampler = sampler_of(Sampling(temperature=0, frequency_penalty=1.0), (), 3)
    logits = np.array([2.5, 2.0, -9], np.float32)
    assert [sampler.draw(logits).token for _ in range(4)] == [0, 1, 0, 1]


def test_repetition_penalty_counts_the_prompt_and_openai_penalties_do_not() -> None:
    logits = np.array([2.0, 1.5], np.float32)
    repetition = sampler_of(Sampling(temperature=0, repetition_penalty=2.0), (0,), 2)
    presence = sampler_of(Sampling(temperature=0, presence_penalty=2.0), (0,), 2)
    assert repetition.draw(logits).token == 1
    assert presence.draw(logits).token == 0


def test_logits_are_left_as_they_were() -> None:
    logits = np.arange(5, dtype=np.float32)
    logits.flags.writeable = False
    sampler = sampler_of(Sampling(repetition_penalty=1.3, presence_penalty=1, top_p=0.9), (1,), 5)
    for _ in range(3):
        sampler.draw(logits)
    assert list(logits) == [0, 1, 2, 3, 4]


@given(sampling=samplings, rows=st.integers(1, 6))
@settings(deadline=None, max_examples=50)
def test_same_seed_gives_same_tokens(sampling: Sampling, rows: int) -> None:
    logits = np.random.default_rng(rows).standard_normal((rows, 500)).astype(np.float32)
    first, second = (sampler_of(sampling, (3, 4), 500) for _ in range(2))
    assert [first.draw(row).token for row in logits] == [second.draw(row).token for row in logits]


def test_other_seed_or_none_gives_other_tokens() -> None:
    logits = np.zeros(10_000, np.float32)
    draws = {
        tuple(sampler_of(Sampling(seed=seed), (), 10_000).draw(logits).token for _ in range(4))
        for seed in (1, 2, -1, None, None)
    }
    assert len(draws) == 5


def test_a_token_without_weight_is_never_drawn() -> None:
    logits = np.full(2000, -np.inf, np.float32)
    logits[[5, 700, 1999]] = [1, 1, 1]
    assert set(np.flatnonzero(drawn_share(logits, Sampling(seed=0), 300))) == {5, 700, 1999}


@given(
    logits=st.lists(
        st.floats(width=32, allow_nan=False).filter(lambda x: x != math.inf),
        min_size=1,
        max_size=40,
    ).filter(lambda row: max(row) > -math.inf),
    sampling=samplings,
    temperature=st.sampled_from([0.0, 1e-300, 1e-6, 1e-4, 2.0]),
)
@settings(deadline=None, max_examples=200)
def test_extreme_numbers_neither_fail_nor_warn(
    logits: list[float], sampling: Sampling, temperature: float
) -> None:
    row = np.array(logits, np.float32)
    how = replace(sampling, temperature=temperature, logit_bias=((0, -100.0),))
    sampler = sampler_of(how, (0,), len(row))
    for _ in range(3):
        token = sampler.draw(row).token
        assert row[token] > -math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_broken_logits_fail_the_request(bad: float, temperature: float) -> None:
    logits = np.array([0, 1, bad], np.float32)
    with pytest.raises(EngineFailureError, match="not finite"):
        sampler_of(Sampling(temperature=temperature), (), 3).draw(logits)


def test_logits_without_any_possible_token_fail_the_request() -> None:
    with pytest.raises(EngineFailureError, match="not finite"):
        sampler_of(Sampling(), (), 3).draw(np.full(3, -np.inf, np.float32))


@given(st.integers(0, VOCAB - 1), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_a_bias_of_100_bans_a_token_or_leaves_no_other(
    token: int, wanted: bool, temperature: float
) -> None:
    logits = np.linspace(-9, 9, VOCAB, dtype=np.float32)
    bias = ((token, 100.0 if wanted else -100.0),)
    sampler = sampler_of(Sampling(temperature=temperature, logit_bias=bias, seed=7), (), VOCAB)
    drawn = {sampler.draw(logits).token for _ in range(50)}
    assert drawn == {token} if wanted else token not in drawn


rows = st.lists(st.floats(-30, 30, width=32) | st.just(-math.inf), min_size=1, max_size=600).filter(
    lambda row: max(row) > -math.inf
)


@given(rows, st.integers(0, 20), st.sampled_from([0.0, 1.0]))
def test_log_probabilities_are_those_of_the_models_own_distribution(
    row: list[float], likeliest: int, temperature: float
) -> None:
    logits = np.array(row, np.float32)
    # What changes the draw changes nothing here.
    how = Sampling(temperature=temperature, logit_bias=((0, 50.0),), presence_penalty=1, seed=1)
    sampler = sampler_of(how, (0,), len(row), logprobs=likeliest)
    sampler.draw(logits)
    drawn = sampler.draw(logits).logprob
    assert drawn is not None
    total = math.log(math.fsum(math.exp(x) for x in row))
    expected = [x - total for x in row]
    assert drawn.logprob == pytest.approx(expected[drawn.token], abs=1e-5)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:likeliest]
    assert [token for token, _ in drawn.top] == order
    assert [logprob for _, logprob in drawn.top] == pytest.approx([expected[i] for i in order])


def test_all_log_probabilities_together_are_one() -> None:
    logits = np.random.default_rng(2).standard_normal(20).astype(np.float32) * 5
    drawn = sampler_of(Sampling(), (), 20, logprobs=20).draw(logits).logprob
    assert drawn is not None
    assert math.fsum(math.exp(logprob) for _, logprob in drawn.top) == pytest.approx(1)


def test_log_probabilities_cost_nothing_where_nobody_asks() -> None:
    logits = np.array([0, 1], np.float32)
    assert sampler_of(Sampling(), (), 2).draw(logits).logprob is None
    alone = sampler_of(Sampling(temperature=0), (), 2, logprobs=0).draw(logits)
    assert alone.logprob == TokenLogprob(1, pytest.approx(-math.log1p(math.exp(-1))))


def test_a_tokenizer_that_cannot_follow_grammars_refuses_the_request() -> None:
    request = GenerationRequest(
        id="r", prompt_ids=(1,), max_tokens=9, grammar=Grammar("json_object")
    )
    with pytest.raises(InvalidRequestError, match="response_format"):
        Sampler(request, 300, ByteTokenizer())
