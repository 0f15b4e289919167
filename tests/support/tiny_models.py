"""Tiny random decoders: a folder of files, and the torch model they were saved from."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_core.models import ModelFiles

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class TinyModel:
    """A model on disk and in torch, with the same float32 weights."""

    files: ModelFiles
    torch_model: Any

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """Return torch's logits `[len(ids), vocab]`."""
        import torch

        with torch.no_grad():
            logits: NDArray[np.float32] = self.torch_model(torch.tensor([ids])).logits[0].numpy()
        return logits


def random_model(family: str, **config: Any) -> Any:
    """Return a random float32 model of a transformers family, the same every time.

    Args:
        family: transformers' `model_type`.
        config: On top of `TINY`, or alone for a family with other words.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights start as ones and biases as zeros, which would hide a wrong one; linear
            # layers start so small that attention would hardly matter.
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    return model


def save_tiny_model(
    folder: Path, family: str, *, dtype: str = "float32", **config: Any
) -> TinyModel:
    """Save a random model of a transformers family as safetensors.

    Args:
        folder: Where to; made if it is not there.
        family: transformers' `model_type`.
        dtype: What the weights are stored as.
        config: As for `random_model`.
    """
    import torch

    model = random_model(family, **config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    # A copy, since the conversion would also round the rotary frequencies of the original.
    copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(folder)
    files = ModelFiles(str(folder), folder.name, folder, "safetensors", "0123456789abcdef")
    return TinyModel(files, model)
