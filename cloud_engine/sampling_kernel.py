"""`sampling.draw` as Triton kernels: the logits are read once, and no noise is written.

Each row is cut into splits, so that one row alone keeps a GPU busy; a second kernel merges them.
"""

import torch
import triton
import triton.language as tl

from cloud_engine.sampling import NEARLY_ONE, SMALL
from engine_core.sampling import GREEDY_BELOW

_BLOCK = 1024
_MOST_SPLITS = 128


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, counters: torch.Tensor
) -> torch.Tensor:
    """Return a token for each row; see `sampling.draw`."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    splits = min(blocks, _MOST_SPLITS)
    partial = logits.new_empty((2, rows, splits), dtype=torch.float32)
    partial_tokens = logits.new_empty((rows, splits), dtype=torch.int32)
    tokens = logits.new_empty(rows, dtype=torch.int32)
    _draw_split[(rows, splits)](
        logits,
        temperatures,
        seeds,
        counters,
        partial,
        partial_tokens,
        vocab,
        *logits.stride(),
        *seeds.stride(),
        blocks=triton.cdiv(blocks, splits),
        block=_BLOCK,
        greedy_below=GREEDY_BELOW,
        nearly_one=NEARLY_ONE,
        small=SMALL,
    )
    _merge[(rows,)](
        partial,
        partial_tokens,
        tokens,
        splits,
        block=triton.next_power_of_2(splits),
    )
    return tokens


@triton.jit
def _draw_split(  # noqa: PLR0917  a kernel's arguments have places
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
    partial: torch.Tensor,
    partial_tokens: torch.Tensor,
    vocab: int,
    row_stride: int,
    token_stride: int,
    seed_stride: int,
    half_stride: int,
    blocks: tl.constexpr,
    block: tl.constexpr,
    greedy_below: tl.constexpr,
    nearly_one: tl.constexpr,
    small: tl.constexpr,
) -> None:
    """Leave the best score of one split of one row, the largest logit and the best token."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, splits = tl.num_programs(0), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature < greedy_below, 0.0, temperature)
    low = tl.load(seeds + row * seed_stride).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(seeds + row * seed_stride + half_stride).to(tl.int64)
    seed = (high << 32) | low
    counter = tl.load(counters + row)

    best_score, best_token, top = float("-inf"), 0, float("-inf")
    for number in range(blocks):
        begin = (split * blocks + number) * block
        token = begin + tl.arange(0, block)
        logit = tl.load(
            logits + row * row_stride + token * token_stride,
            mask=token < vocab,
            other=float("-inf"),
        ).to(tl.float32)
        group = begin // 4 + tl.arange(0, block // 4)
        zero = group * 0
        a, b, c, d = tl.philox(seed, group, zero + counter, zero, zero)
        # Interleaving pairs of pairs puts the four words of a group side by side.
        word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
        uniform = tl.minimum((word.to(tl.float32) + 0.5) * (1 / 4294967296), nearly_one)
        exponential = tl.where(
            uniform < small, uniform + 0.5 * uniform * uniform, -tl.log(1 - uniform)
        )
        score = logit - temperature * tl.log(exponential)
        found, place = tl.max(score, axis=0, return_indices=True)
        better = found > best_score
        best_token = tl.where(better, begin + place, best_token)
        best_score = tl.where(better, found, best_score)
        # A maximum may skip NaN, which nothing equals; as infinity it is seen.
        known = tl.where(logit <= float("inf"), logit, float("inf"))
        top = tl.maximum(top, tl.max(known, axis=0))

    cell = row * splits + split
    tl.store(partial + cell, best_score)
    tl.store(partial + rows * splits + cell, top)
    tl.store(partial_tokens + cell, best_token)


@triton.jit
def _merge(
    partial: torch.Tensor,
    partial_tokens: torch.Tensor,
    tokens: torch.Tensor,
    splits: int,
    block: tl.constexpr,
) -> None:
    """Keep the best of a row's splits; of equal ones the first."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    split = tl.arange(0, block)
    cell = row * splits + split
    inside = split < splits
    score = tl.load(partial + cell, mask=inside, other=float("-inf"))
    top = tl.max(tl.load(partial + rows * splits + cell, mask=inside, other=float("-inf")), axis=0)
    token = tl.load(partial_tokens + row * splits + tl.argmax(score, axis=0))
    finite = (top < float("inf")) & (top > float("-inf"))
    tl.store(tokens + row, tl.where(finite, token, -1))
