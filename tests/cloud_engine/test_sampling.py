"""Draws: known random numbers, the right distribution, no word from the batch mates."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_script import run_triton_script

from cloud_engine.sampling import draw, draw_on, greedy, philox

VOCAB = 37


def logits(rows: int = 1, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def seeds(*numbers: int) -> torch.Tensor:
    halves = [[number & 0xFFFFFFFF, number >> 32] for number in numbers]
    return torch.tensor(halves, dtype=torch.int64).to(torch.int32)


def drawn(
    rows: torch.Tensor, temperature: float = 1.0, seed: int = 7, counter: int = 0
) -> list[int]:
    """Return a token for each row; all rows have the same temperature, seed and counter."""
    count = len(rows)
    tokens: list[int] = draw(
        rows,
        torch.full((count,), temperature),
        seeds(*[seed] * count),
        torch.full((count,), counter, dtype=torch.int32),
    ).tolist()
    return tokens


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_has_the_published_answers(counter: str, key: str, words: str) -> None:
    # kat_vectors of the Random123 library, philox4x32 with 10 rounds.
    def parse(text: str) -> Any:
        return tuple(torch.tensor([int(word, 16)]) for word in text.split())

    assert philox(parse(counter), parse(key)) == parse(words)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_have_the_distribution_of_the_tempered_softmax(temperature: float) -> None:
    row, count = logits(), 40_000
    tokens = draw(
        row.expand(count, -1),
        torch.full((count,), temperature),
        seeds(*[3] * count),
        torch.arange(count, dtype=torch.int32),
    )
    expected = count * torch.softmax(row[0] / temperature, 0)
    observed = torch.bincount(tokens, minlength=VOCAB)
    often = expected >= 5  # the rarer ones together are one more class
    wanted = [*expected[often].tolist(), expected[~often].sum().item()]
    found = [*observed[often].tolist(), observed[~often].sum().item()]
    square = sum((f - w) ** 2 / w for f, w in zip(found, wanted, strict=True) if w)
    # Normal approximation of Wilson and Hilferty: one in a thousand is beyond it.
    degrees = len(wanted) - 1
    part = 2 / (9 * degrees)
    assert square < degrees * (1 - part + 3.09 * math.sqrt(part)) ** 3


def test_different_seeds_are_as_independent_as_different_counters() -> None:
    row, count = torch.zeros(1, 4), 20_000
    tokens = draw(
        row.expand(count, -1),
        torch.ones(count),
        seeds(*[number << 20 for number in range(count)]),
        torch.zeros(count, dtype=torch.int32),
    )
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert ((pairs - count / 16).abs() < 5 * math.sqrt(count / 16)).all()


def test_a_token_depends_on_its_own_row_alone() -> None:
    rows = logits(5)
    temperatures = torch.tensor([1.0, 0.0, 0.8, 1.5, 1.0])
    keys = seeds(1, 2**40 + 5, 2**64 - 1, 9, 1)
    counters = torch.tensor([4, 5, 0, 2**31 - 1, 4], dtype=torch.int32)
    together = draw(rows, temperatures, keys, counters)
    for order in ([4, 2, 0, 1, 3], [2], [3, 3]):
        again = draw(rows[order], temperatures[order], keys[order], counters[order])
        assert torch.equal(again, together[order])


def test_the_vocabulary_s_length_does_not_change_a_draw() -> None:
    rows = logits(8, 64)
    longer = torch.cat([rows, torch.full((8, 3), -math.inf)], dim=1)
    assert drawn(rows) == drawn(longer)


@pytest.mark.parametrize("other", [{"seed": 8}, {"seed": 7 + 2**32}, {"counter": 1}])
def test_another_seed_or_counter_draws_other_tokens(other: dict[str, int]) -> None:
    rows = torch.zeros(1, 1000)
    assert drawn(rows) != drawn(rows, **other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_temperature_takes_the_first_of_the_likeliest_tokens(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, -math.inf, 0.0, 1.0]], dtype=dtype)
    assert drawn(rows, temperature=0.0) == [1, 0]
    assert drawn(rows, temperature=9e-6) == [1, 0]
    assert greedy(rows).tolist() == [1, 0]
    assert greedy(rows).dtype == torch.int32


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_without_a_finite_maximum_has_no_token(temperature: float, broken: float) -> None:
    rows = logits(3)
    rows[0, 5] = broken
    rows[2] = -math.inf
    for tokens in (drawn(rows, temperature), greedy(rows).tolist()):
        assert tokens[0] == tokens[2] == -1
        assert tokens[1] >= 0


def test_an_impossible_token_is_never_drawn() -> None:
    rows = torch.zeros(400, 8)
    rows[:, 3] = -math.inf
    counters = torch.arange(400, dtype=torch.int32)
    tokens = draw(rows, torch.full((400,), 5.0), seeds(*[0] * 400), counters)
    assert set(tokens.tolist()) == {0, 1, 2, 4, 5, 6, 7}


def test_the_cpu_has_the_reference() -> None:
    assert draw_on(torch.device("cpu")) is draw


@pytest.mark.slow
def test_triton_s_kernel_draws_the_same_tokens(tmp_path: Path) -> None:
    run_triton_script(COMPARISON, tmp_path, TRITON_INTERPRET="1")


COMPARISON = """
import torch

from cloud_engine.sampling import draw
from cloud_engine.sampling_kernel import draw as kernel

torch.manual_seed(0)
for vocab in (1, 5, 97, 1025, 3001):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        # Wider than its view, and seeds that lie crosswise, as those of the step's inputs do.
        logits = (3 * torch.randn(7, vocab + 3)).to(dtype)[:, :vocab]
        logits[4, vocab // 2] = float("nan")
        logits[5] = -float("inf")
        logits[6, vocab // 3] = -float("inf") if vocab > 1 else 0.0
        temperatures = torch.tensor([0, 1, 0.7, 2, 1, 1, 1e-6])
        seeds = torch.randint(-(2**31), 2**31, (2, 7)).int().T
        counters = torch.tensor([0, 1, -5, 7, 2**31 - 1, 3, 4], dtype=torch.int32)
        found = kernel(logits, temperatures, seeds, counters)
        assert torch.equal(found, draw(logits, temperatures, seeds, counters)), (vocab, dtype)
        assert found.dtype == torch.int32
        assert found[4] == found[5] == -1
"""
