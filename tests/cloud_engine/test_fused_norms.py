"""Norms that torch has as one operation are replaced, and only those."""

from typing import Any

import pytest
import torch
from tiny_models import TINY, random_model

from cloud_engine.fused_norms import fuse_norms


@pytest.mark.parametrize(
    ("family", "norms"), [("llama", 5), ("qwen2", 5), ("qwen3", 9), ("mistral", 5)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_computes_the_same_with_fused_norms(
    family: str, norms: int, dtype: torch.dtype
) -> None:
    model = random_model(family, **TINY).to(dtype)
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        before = model(tokens).logits
        assert fuse_norms(model) == norms
        off = (model(tokens).logits - before).abs().max() / before.abs().max()
    assert off <= (1e-6 if dtype == torch.float32 else 0.05)
    assert fuse_norms(model) == 0


def test_norms_that_mean_something_else_by_their_weights_stay() -> None:
    model: Any = random_model("gemma3_text", **TINY)
    assert fuse_norms(model) == 0


def test_a_norm_of_that_name_with_another_formula_stays() -> None:
    class OffsetRMSNorm(torch.nn.Module):
        variance_epsilon = 1e-6
        weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(values, (8,), 1 + self.weight, 1e-6)

    assert fuse_norms(torch.nn.Sequential(OffsetRMSNorm())) == 0
