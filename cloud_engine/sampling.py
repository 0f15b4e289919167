"""Drawing tokens on the device, so that a draw can be part of a captured graph.

A token is drawn with the Gumbel-max trick: the argmax of `logits + temperature * noise` has the
distribution `softmax(logits / temperature)` when the noise is Gumbel's, and temperature 0 makes it
the likeliest token without a branch. The noise is a function of the request's seed, a counter and
the token's id alone. So no generator's state is captured in a graph, and a request's tokens depend
neither on its batch mates nor on its row.

The random numbers are Philox4x32-10 of J. K. Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (SC 2011): the key is the seed, the counter block (token // 4, counter, 0, 0), and token's
word of the four is token % 4.
"""

from collections.abc import Callable

import numpy as np
import torch

from engine_core.sampling import GREEDY_BELOW

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""See `draw`."""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
NEARLY_ONE = 1 - 2**-24
"""The largest float32 under 1, so that no noise is infinite."""
SMALL = 2**-10
"""Under it `v + v**2 / 2` is closer to `-log(1 - v)` than float32's `1 - v` lets a logarithm be."""


def draw_on(device: torch.device) -> Draw:
    """Return the draw for a device; all of them draw the same tokens."""
    if device.type == "cuda":
        # Triton is only there where CUDA is.
        from cloud_engine.sampling_kernel import draw as fused_draw  # noqa: PLC0415

        return fused_draw
    return draw


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return what `draw` does at temperature 0, on the host and without the price of the noise.

    Args:
        logits: `[n, vocab]` of any floating type, on the CPU.
    """
    # NumPy takes 0.01 ms for a row of 49k numbers, torch a quarter of a millisecond.
    values = logits.float().numpy()
    tokens = values.argmax(axis=1)  # the first NaN, if there is one
    top = np.take_along_axis(values, tokens[:, None], axis=1)[:, 0]
    return torch.from_numpy(np.where(np.isfinite(top), tokens, -1).astype(np.int32))


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, counters: torch.Tensor
) -> torch.Tensor:
    """Return a token for each row, int32 `[n]`; -1 where the row's largest logit is not finite.

    Reads nothing on the host, so that it can be captured.

    Args:
        logits: `[n, vocab]` of any floating type; NaN counts as the largest.
        temperatures: float32 `[n]`; under `GREEDY_BELOW` the likeliest token is taken.
        seeds: int32 `[n, 2]`, the low and the high half of each row's seed.
        counters: int32 `[n]`, another one for each token that is drawn with the same seed.
    """
    scale = torch.where(temperatures < GREEDY_BELOW, 0.0, temperatures)[:, None]
    noise = _gumbel(seeds, counters, logits.shape[1])
    tokens = torch.addcmul(logits.float(), scale, noise).argmax(dim=1)
    return torch.where(logits.amax(dim=1).isfinite(), tokens, -1).int()


def _gumbel(seeds: torch.Tensor, counters: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return Gumbel noise, float32 `[n, vocab]`.

    The highest scores come from the smallest of the exponential variates, so these have all 32 bits
    of a word: with 24, tokens of a probability near 1e-7 would be drawn too often or never.
    """
    groups = torch.arange(-(-vocab // 4), device=seeds.device)[None, :]
    zero = torch.zeros_like(groups)
    key = (seeds[:, :1].long() & _WORD, seeds[:, 1:].long() & _WORD)
    words = philox((groups, counters[:, None].long() & _WORD, zero, zero), key)
    uniform = torch.stack(words, dim=2).flatten(1)[:, :vocab].float()
    uniform = uniform.add_(0.5).mul_(2**-32).clamp_(max=NEARLY_ONE)
    small = uniform + 0.5 * uniform * uniform
    exponential = torch.where(uniform < SMALL, small, -torch.log(1 - uniform))
    return exponential.log_().neg_()


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return four random words for each counter block.

    Args:
        counter: int64 tensors of words, 0 to 2**32 - 1, that broadcast with each other.
        key: Two more of them.
    """
    zeroth, first, second, third = counter
    low, high = key
    for _ in range(_ROUNDS):
        # Modulo 2**64 the products are right, whatever sign int64 reads into them.
        even, odd = zeroth * _MULTIPLIERS[0], second * _MULTIPLIERS[1]
        zeroth, second = (
            ((odd >> 32) & _WORD) ^ first ^ low,
            ((even >> 32) & _WORD) ^ third ^ high,
        )
        first, third = odd & _WORD, even & _WORD
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return zeroth, first, second, third
