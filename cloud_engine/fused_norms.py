"""RMS norms in one operation of torch's, in place of the five to eight that models spell out."""

from typing import Any

import torch
from torch import nn

_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of values around 1. A norm rounds to the model's type once or twice, before and after the weight."""


def fuse_norms(model: Any) -> int:
    """Replace the norms that compute what `torch.nn.RMSNorm` does; return how many they were.

    Models name such modules alike but do not all mean the same by it (Gemma's weights are offsets
    from 1), so each is tried on random numbers first.

    Args:
        model: On its device; its weights stay where they are.
    """
    fused = 0
    for owner in list(model.modules()):
        for name, norm in list(owner.named_children()):
            if (replacement := _fused(norm)) is not None:
                setattr(owner, name, replacement)
                fused += 1
    return fused


@torch.no_grad()
def _fused(norm: nn.Module) -> nn.RMSNorm | None:
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not type(norm).__name__.endswith("RMSNorm") or weight is None or epsilon is None:
        return None
    with torch.device("meta"):
        fused = nn.RMSNorm(len(weight), eps=epsilon)
    fused.weight = weight
    # Of ordinary size, and so small that the epsilon matters.
    for scale in (1.0, epsilon**0.5):
        values = scale * torch.randn(3, len(weight), dtype=weight.dtype, device=weight.device)
        off = (norm(values) - fused(values)).abs().max()
        if not off <= _TOLERANCES[weight.dtype] * weight.abs().max():
            return None
    return fused.eval()
