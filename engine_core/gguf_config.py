"""Say what a GGUF file's model is in the words of Hugging Face's `config.json`."""

import math
import struct
from typing import Any

from engine_core.errors import ModelError
from engine_core.gguf_file import GgufFile

_F32 = 0
_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_LLAMA3_LOW_FREQUENCY, _LLAMA3_HIGH_FREQUENCY, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""The constants of every published Llama 3.1-3.3; only the factor varies (8 or 32)."""


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return what `config.json` would say about the shape of a file's decoder.

    Raises:
        ModelError: the architecture is not Llama-shaped, or a needed number is missing or none.
    """
    return _Config(file).build()


class _Config:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = str(file.metadata.get("general.architecture", ""))
        if self._architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{file.path} holds a model of architecture {self._architecture!r}; from GGUF, "
                f"only {', '.join(_ARCHITECTURES)} can be read. Use the model's safetensors folder or "
                "its Hugging Face name instead."
            )
        if self._number("expert_count", 0, least=0):
            raise ModelError(
                f"{file.path} holds a mixture-of-experts model; only dense models can be read."
            )

    def build(self) -> dict[str, Any]:
        vocab_size, hidden_size = self._embedding_shape()
        heads = self._number("attention.head_count")
        config: dict[str, Any] = {
            "model_type": self._architecture,
            "hidden_act": "silu",
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": self._head_dim(hidden_size // heads),
            "intermediate_size": self._number("feed_forward_length"),
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._real("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._real("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
        }
        if window := self._number("attention.sliding_window", 0, least=0):
            config["sliding_window"] = window
        return config

    def _head_dim(self, default: int) -> int:
        head_dim = self._number("attention.key_length", default)
        if self._number("rope.dimension_count", head_dim) != head_dim:
            raise ModelError(
                f"{self._file.path} rotates only a part of each attention head: not supported."
            )
        return head_dim

    def _embedding_shape(self) -> tuple[int, int]:
        info = self._file.tensors.get("token_embd.weight")
        if info is None or len(info.shape) != 2:
            raise ModelError(f"{self._file.path} has no token embedding; it is not a whole model.")
        return info.shape[0], info.shape[1]

    def _rope_scaling(self) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._file.tensors:
            return self._llama3_scaling()
        kind = self._value("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ModelError(f"{self._file.path} scales its positions by {kind!r}: not supported.")
        scaling = {"rope_type": kind, "factor": self._real("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._number(
                "rope.scaling.original_context_length"
            )
        return scaling

    def _llama3_scaling(self) -> dict[str, Any]:
        """Recover Llama 3's scaling from the divisors that GGUF stores in its place.

        The formula is that of transformers' `_compute_llama3_parameters`. The factor is the
        largest divisor; the whole row must then follow from it, else the model is refused rather
        than run with wrong positions.
        """
        stored = self._row("rope_freqs.weight")
        factor = max(stored)
        theta = self._real("rope.freq_base", 10000.0)
        low = _LLAMA3_CONTEXT / _LLAMA3_LOW_FREQUENCY
        high = _LLAMA3_CONTEXT / _LLAMA3_HIGH_FREQUENCY
        for index, divisor in enumerate(stored):
            wavelength = 2 * math.pi * theta ** (index / len(stored))
            if wavelength < high:
                expected = 1.0
            elif wavelength > low:
                expected = factor
            else:
                share = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW_FREQUENCY) / (
                    _LLAMA3_HIGH_FREQUENCY - _LLAMA3_LOW_FREQUENCY
                )
                expected = 1 / ((1 - share) / factor + share)
            if not math.isclose(divisor, expected, rel_tol=1e-3):
                raise ModelError(
                    f"{self._file.path} scales its positions in a way that is not Llama 3's: "
                    "not supported."
                )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW_FREQUENCY,
            "high_freq_factor": _LLAMA3_HIGH_FREQUENCY,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }

    def _row(self, name: str) -> tuple[float, ...]:
        info = self._file.tensors[name]
        if info.type_id != _F32 or not info.nbytes:
            raise ModelError(f"{self._file.path}: tensor {name!r} is not float32.")
        with self._file.path.open("rb") as stream:
            stream.seek(info.offset)
            return struct.unpack(f"<{info.nbytes // 4}f", stream.read(info.nbytes))

    def _value(self, key: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(
                    f"{self._file.path}: {key} differs from layer to layer, which is not supported."
                )
            value = value[0]
        if value is None:
            raise ModelError(f"{self._file.path} lacks {self._architecture}.{key}.")
        return value

    def _number(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or value < least:
            raise self._damaged(key, value)
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        # Stored as float32: 1e-5 reads as 9.999999747378752e-06. Seven digits are all it has.
        value = self._value(key, default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._damaged(key, value)
        return float(f"{value:.7g}")

    def _damaged(self, key: str, value: object) -> ModelError:
        return ModelError(
            f"{self._file.path} is damaged: {self._architecture}.{key} cannot be {value!r:.40}. "
            "Download or copy it again."
        )
