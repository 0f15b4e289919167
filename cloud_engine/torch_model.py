"""A transformers model as a step model: one sequence, its keys and values on the device."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.errors import EngineFailureError, ModelError


class TorchModel:
    """Steps any `AutoModelForCausalLM` that keeps its past in a `Cache`.

    The model makes its own cache, so that sliding windows and other shapes of a past are as its
    authors meant them; on transformers 4.57 and 5.x alike.

    Args:
        model: In inference mode, on its device.
        context: Longest sequence in tokens; None for what the model was made for.
    """

    def __init__(self, model: Any, context: int | None = None) -> None:
        self._model = model
        self._past: Any = None
        self._length = 0
        self.context_window = _context_window(model.config, context)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.kv_token_bytes = self._measure()
        self.details: dict[str, str | int | float | bool] = {
            "kind": "torch",
            "architecture": type(model).__name__,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "weight_bytes": sum(p.nbytes for p in model.parameters()),
        }

    def reset(self) -> None:
        """Forget the sequence and free its keys and values."""
        self._past = None
        self._length = 0

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens; return the logits after the last, shape [vocab].

        Raises:
            EngineFailureError: the device has no memory left for this sequence.
        """
        ids = torch.tensor([token_ids], device=self._model.device)  # [1, tokens]
        options = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=ids, past_key_values=self._past, use_cache=True, **options
                )
        except torch.OutOfMemoryError:
            raise EngineFailureError(
                f"The device has no memory left for a sequence of {self._length + len(token_ids)} "
                "tokens; shorten the request or give the engine a smaller context."
            ) from None
        self._past = output.past_key_values
        self._length += len(token_ids)
        logits: NDArray[np.float32] = output.logits[0, -1].float().cpu().numpy()  # [vocab]
        return logits

    def close(self) -> None:
        """Free the model."""
        self.reset()
        self._model = None

    def _measure(self) -> int:
        """Run one token through, which also proves that the model works; return its KV bytes."""
        try:
            self.forward((0,))
            size = sum(
                part.nbytes for layer in self._past.layers for part in (layer.keys, layer.values)
            )
        except AttributeError:
            raise ModelError(
                f"{type(self._model).__name__} keeps no keys and values that this engine can "
                "count; choose a transformer decoder"
            ) from None
        finally:
            self.reset()
        return int(size)


def _context_window(config: Any, wanted: int | None) -> int:
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is None:
        if wanted is None:
            raise ModelError("the model does not say how long its context is; set a context")
        return wanted
    if wanted is not None and wanted > longest:
        raise ModelError(f"a context of {wanted} tokens is more than the {longest} of this model")
    return int(wanted or longest)
