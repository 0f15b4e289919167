"""Read a GGUF file: its metadata, where its tensors lie, and whether it is whole.

The `gguf` package's own reader needs seconds for a vocabulary, because it makes a NumPy view of
every string. This one needs tens of milliseconds and no NumPy, and it checks every length against
the file before it trusts it.

Layout and names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from engine_core.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_METADATA_BYTES = 256 << 20
"""Larger than any published vocabulary (about 10 MB); above it the lengths are nonsense."""
_MAX_DIMENSIONS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}

TENSOR_BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Tensor type → name, elements in a block, bytes of a block (ggml's type traits)."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Args:
        name: ggml's name, e.g. `blk.0.attn_q.weight`.
        shape: Row-major shape as NumPy and PyTorch write it: `(rows, columns)`.
        type_id: ggml's tensor type, a key of `TENSOR_BLOCKS`.
        offset: First byte, from the start of the file.
        nbytes: Length in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The head of a GGUF file whose tensors are all inside the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and tensor table, and check that the file is whole.

    Raises:
        ModelError: no GGUF, a version or byte order that is not supported, one part of a split
            model, or shorter than its own table says.
    """
    try:
        with path.open("rb") as stream:
            reader = _Reader(stream, path)
            metadata, tensors = reader.head()
            size = reader.size
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    end = max((info.offset + info.nbytes for info in tensors.values()), default=0)
    if end > size:
        raise ModelError(
            f"{path} is cut off: it has {size:,} bytes and its tensors need {end:,}. "
            "Download or copy it again."
        )
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelError(
            f"{path} is one of {parts} parts. Join them first: "
            "llama-gguf-split --merge FIRST_PART OUTPUT."
        )
    return GgufFile(path, metadata, tensors)


class _Reader:
    """A bounds-checked cursor over the head of the file."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        if stream.read(4) != _MAGIC:
            raise ModelError(f"{path} is not a GGUF file.")
        # The head is read as one piece; tensor data behind it is not touched.
        self._stream = stream
        self._data = b""
        self._at = 0
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ModelError(
                f"{path} is GGUF version {version}, or written for a big-endian machine; versions "
                "2 and 3, little-endian, can be read. Convert it with a current llama.cpp."
            )

    def head(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        tensor_count, pair_count = self._scalar("<Q"), self._scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._text()
            metadata[key] = self._value(self._scalar("<I"))
        found = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._broken("its alignment is no positive number")
        start = 4 + self._at
        start += -start % alignment
        return metadata, {
            name: TensorInfo(name, shape, type_id, start + offset, nbytes)
            for name, shape, type_id, offset, nbytes in found
        }

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int, int]:
        name = self._text()
        dimensions = self._scalar("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise self._broken(f"tensor {name!r} has {dimensions} dimensions")
        extents = [self._scalar("<Q") for _ in range(dimensions)]
        type_id, offset = self._scalar("<I"), self._scalar("<Q")
        if type_id not in TENSOR_BLOCKS:
            raise ModelError(
                f"{self.path}: tensor {name!r} has type {type_id}, which is not known here. "
                "Use a quantisation such as Q8_0, Q4_K_M or F16."
            )
        _, block, block_bytes = TENSOR_BLOCKS[type_id]
        elements = prod(extents)
        if elements % block:
            raise self._broken(f"tensor {name!r} is no whole number of blocks")
        return name, tuple(reversed(extents)), type_id, offset, elements // block * block_bytes

    def _value(self, kind: int) -> Any:
        if kind == _ARRAY:
            return self._array()
        return self._text() if kind == _STRING else self._scalar(self._format(kind))

    def _array(self) -> list[Any]:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind == _STRING:
            # Each text has at least its length, so a count beyond the file is a lie: refuse it
            # before the loop, not after billions of rounds.
            if count > self.size:
                raise self._broken("an array is longer than the file")
            return [self._text() for _ in range(count)]
        item = self._format(kind)[1]
        start = self._advance(count * struct.calcsize(f"<{item}"))
        return list(struct.unpack_from(f"<{count}{item}", self._data, start))

    def _format(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self._broken(f"metadata type {kind} is not known")
        return _SCALARS[kind]

    def _scalar(self, form: str) -> Any:
        start = self._advance(struct.calcsize(form))
        return struct.unpack_from(form, self._data, start)[0]

    def _text(self) -> str:
        length = self._scalar("<Q")
        start = self._advance(length)
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError:
            raise self._broken("a text in its metadata is not UTF-8") from None

    def _advance(self, count: int) -> int:
        """Move over `count` bytes, reading more of the file if needed; return where they start."""
        start, self._at = self._at, self._at + count
        if self._at > min(self.size, _MAX_METADATA_BYTES):
            raise self._broken("its metadata is cut off")
        if self._at > len(self._data):
            missing = max(self._at - len(self._data), 4 << 20)
            self._data += self._stream.read(missing)
            if self._at > len(self._data):
                raise self._broken("its metadata is cut off")
        return start

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"{self.path} is damaged: {reason}. Download or copy it again.")
