"""From a model's files to a model that steps."""

from typing import Literal

import torch

from cloud_engine.fused_norms import fuse_norms
from cloud_engine.int8 import quantize_linears
from cloud_engine.load import load_causal_lm
from cloud_engine.packed_model import PackedModel
from cloud_engine.runner import Runner, RunnerOptions
from engine_core.models import ModelFiles, ModelStore

Weights = Literal["auto", "int8", "int8-all"]


def open_model(
    files: ModelFiles,
    store: ModelStore,
    *,
    device: torch.device,
    dtype: torch.dtype,
    weights: Weights = "auto",
    options: RunnerOptions | None = None,
) -> Runner:
    """Load a model.

    Args:
        files: Of the model.
        store: Where what is made of them is kept.
        device: Where it computes.
        dtype: What it computes in.
        weights: `auto` for that type, `int8` for the layers' in int8, `int8-all` for the embeddings
            and the head as well.
        options: What the operator chose.

    Raises:
        ModelError: the model cannot be loaded, quantised or served, or does not fit.
    """
    model = load_causal_lm(files, store, device=device, dtype=dtype)
    if weights != "auto":
        quantize_linears(model, embeddings=weights == "int8-all")
    fuse_norms(model)
    return Runner(PackedModel(model), options or RunnerOptions())
