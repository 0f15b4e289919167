"""Weights of a model, one float32 tensor at a time, under Hugging Face names.

Both readers take from disk only what is asked for, so that a build never holds a whole model.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_engine.arch import LlamaShape
from engine_core.errors import ModelError
from engine_core.gguf_config import config_of
from engine_core.gguf_file import TENSOR_BLOCKS, read_gguf
from engine_core.model_check import read_json, safetensors_files
from engine_core.models import ModelFiles

_DTYPES: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Weights(Protocol):
    """A model's configuration and its tensors."""

    config: dict[str, Any]
    """What `config.json` says, or the same keys translated from GGUF metadata."""
    elements: dict[str, int]
    """Names that `read` accepts, and how many numbers each tensor has."""

    def read(self, name: str) -> NDArray[np.float32]:
        """Return one tensor, linear layers as `[out, in]`.

        Raises:
            KeyError: there is no such tensor.
            ModelError: it is damaged: unreadable, or with infinities or NaN.
        """
        ...


class SafetensorsWeights:
    """A local folder with `config.json` and one or more `.safetensors` files.

    The files are read directly: the library's NumPy side knows no bfloat16 and maps whole files.

    Raises:
        ModelError: a file cannot be read, or its weights are quantised already.
    """

    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "config.json")
        if "quantization_config" in self.config:
            raise ModelError(
                f"{folder} is already quantised in a way only its own runtime reads; use the "
                "original float checkpoint, or a GGUF file of it."
            )
        self._tensors: dict[str, _Place] = {}
        for file in safetensors_files(folder):
            self._tensors.update(_places(file))
        self.elements = {name: prod(place.shape) for name, place in self._tensors.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        """Return one tensor as float32."""
        place = self._tensors[name]
        if place.dtype not in _DTYPES:
            raise ModelError(
                f"{place.file}: {name} is stored as {place.dtype}; use a checkpoint in float32, "
                "float16 or bfloat16."
            )
        raw = np.fromfile(place.file, np.uint8, place.nbytes, offset=place.offset)
        try:
            values = raw.view(_DTYPES[place.dtype]).reshape(place.shape)
        except ValueError:
            raise ModelError(
                f"{place.file} is damaged at {name}; download the model again."
            ) from None
        if place.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            return _finite(name, (values.astype(np.uint32) << 16).view(np.float32))
        return _finite(name, values.astype(np.float32, copy=False))


class GgufWeights:
    """One `.gguf` file of a Llama-shaped model, in any quantisation that `gguf` can undo.

    Raises:
        ModelError: the file cannot be read, or is not Llama-shaped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        file = read_gguf(path)
        self.config = config_of(file)
        named = ((_hf_name(info.name), info) for info in file.tensors.values())
        self._tensors = {name: info for name, info in named if name is not None}
        self.elements = {name: prod(info.shape) for name, info in self._tensors.items()}

    def read(self, name: str) -> NDArray[np.float32]:
        """Return one tensor, dequantised to float32."""
        from gguf import GGMLQuantizationType, dequantize  # noqa: PLC0415 - only GGUF builds need it

        info = self._tensors[name]
        raw = np.fromfile(self._path, dtype=np.uint8, count=info.nbytes, offset=info.offset)
        rows = raw.reshape(prod(info.shape[:-1]), -1)
        try:
            values = dequantize(rows, GGMLQuantizationType(info.type_id))
        except NotImplementedError:
            kind = TENSOR_BLOCKS[info.type_id][0]
            raise ModelError(
                f"{self._path}: {info.name} is stored as {kind}, which cannot be read here; use "
                "a file with Q8_0, Q4_K_M or F16."
            ) from None
        values = _finite(name, np.asarray(values, dtype=np.float32).reshape(info.shape))
        if self.config["model_type"] != "llama":
            return values
        if ".q_proj." in name:
            return _unpermuted(values, self.config["num_attention_heads"])
        if ".k_proj." in name:
            return _unpermuted(values, self.config["num_key_value_heads"])
        return values


def open_weights(files: ModelFiles) -> Weights:
    """Open a model's weights, whichever of the two formats they are in."""
    if files.format == "gguf":
        return GgufWeights(files.path)
    return SafetensorsWeights(files.path)


def is_tied(weights: Weights, shape: LlamaShape) -> bool:
    """Return whether the embedding is also the head; some checkpoints only show it by its absence."""
    return shape.tied or "lm_head.weight" not in weights.elements


def _finite(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(values).all():
        raise ModelError(
            f"{name} holds numbers that are not finite: the checkpoint is damaged. Download it "
            "again."
        )
    return values


def _places(file: Path) -> Iterator[tuple[str, _Place]]:
    """Read where each tensor of a file lies; the store has checked that the file is whole."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        offset = 8 + header_bytes + begin
        yield name, _Place(file, entry["dtype"], tuple(entry["shape"]), offset, end - begin)


def _unpermuted(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's interleaving of the two rotary halves of each head.

    Its converter stores row pairs `(i, i + head_dim/2)` next to each other for architecture
    `llama` (`LlamaModel.permute` in convert_hf_to_gguf.py).
    """
    rows = values.shape[0]
    pairs = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _hf_name(gguf_name: str) -> str | None:
    if gguf_name in _GGUF_TOP_NAMES:
        return _GGUF_TOP_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, kind] if part in _GGUF_LAYER_NAMES:
            return f"model.layers.{layer}.{_GGUF_LAYER_NAMES[part]}.{kind}"
    return None
