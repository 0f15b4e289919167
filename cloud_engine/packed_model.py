"""An unmodified transformers decoder, driven as one packed stream of many sequences' tokens."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from cloud_engine.attention import ATTENTION, PackedStep, check_supported
from engine_core.errors import ModelError

_WITNESS_TOKENS = 24
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06, torch.float16: 0.02}
"""Of the largest logit. Other orders of the same sums differ by 1e-6 in float32 on models of two
to thirty layers; a number type with n bits of mantissa by 2**-n times a few."""


@dataclass(frozen=True, slots=True)
class Witness:
    """A text and the logits `[tokens, vocab]` after each of it, by the model's own attention."""

    tokens: list[int]
    logits: torch.Tensor


class PackedModel:
    """What a step needs of a model.

    Args:
        model: In inference mode, on its device; its attention is replaced.

    Raises:
        ModelError: it does something between tokens that a packed stream cannot follow.
    """

    def __init__(self, model: Any) -> None:
        check_supported(model)
        self._model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.witness, self.layers = _witness(model)
        """`layers` are the key-value heads and the size of a head, for each layer."""
        model.set_attn_implementation(ATTENTION)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return sum(2 * heads * size for heads, size in self.layers) * self.dtype.itemsize

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        packed: PackedStep,
    ) -> torch.Tensor:
        """Compute tokens; return logits `[rows, vocab]`.

        Args:
            tokens: Ids, `[1, T]`.
            positions: Of each in its own sequence, `[1, T]`.
            logit_rows: Places in the stream whose logits are wanted, `[rows]`.
            packed: Whose tokens they are.
        """
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=logit_rows,
            packed=packed,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def check_against_witness(self, logits: torch.Tensor, tokens: int) -> None:
        """Compare the logits `[vocab]` that steps gave after the witness's first tokens with its own.

        Raises:
            ModelError: they are not the same.
        """
        wanted, found = self.witness.logits[tokens - 1].float(), logits.float()
        off = float((found - wanted).abs().max() / wanted.abs().max())
        if not off <= _TOLERANCE[self.dtype]:  # also if it is no number
            raise ModelError(
                f"{type(self._model).__name__} computes something else in a packed stream than by "
                f"itself (logits {off:.1%} off), so this engine cannot serve it; serve it with "
                "vLLM or SGLang and name that server as a 'url' target."
            )

    def longest(self) -> int | None:
        """Return the most tokens of a sequence that the model was made for; None if it is silent.

        Rotary embeddings that change with the longest sequence of a step would make answers depend
        on their company, so a sequence stays as short as they are constant.
        """
        config = self._model.config.get_text_config()
        longest: int | None = getattr(config, "max_position_embeddings", None)
        rope = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None)
        if rope and rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", longest
            )
            return int(original) if original else longest
        return longest

    def details(self) -> dict[str, str | int | float | bool]:
        """Return what stats say about the model."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return {
            "architecture": type(self._model).__name__,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "weight_bytes": sum(tensor.nbytes for tensor in tensors),
            "weight_bytes_int8": sum(t.nbytes for t in tensors if t.dtype == torch.int8),
        }

    def close(self) -> None:
        """Free the model."""
        self._model = None


@torch.inference_mode()
def _witness(model: Any) -> tuple[Witness, list[tuple[int, int]]]:
    """Let the model compute a text by itself; return it, and the shapes of its cache's layers."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # Spread over the vocabulary, without repeats.
    tokens = [(i * 7919 + 101) % vocabulary for i in range(_WITNESS_TOKENS)]
    try:
        output = model(torch.tensor([tokens], device=model.device), use_cache=True)
        layers = [
            (layer.keys.shape[1], layer.keys.shape[3]) for layer in output.past_key_values.layers
        ]
    except AttributeError:
        raise ModelError(
            f"{type(model).__name__} keeps no keys and values that this engine knows; choose a "
            "transformer decoder"
        ) from None
    return Witness(tokens, output.logits[0]), layers
