"""Tensors of a graph in a file beside it, written one after the other and mapped at load."""

from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import onnx
from numpy.typing import NDArray

# Memory maps start on page boundaries; 4096 is the page size of every platform we run on, and
# ONNX recommends at least this alignment for external data.
_ALIGNMENT = 4096
# Below this a tensor costs less inside the graph than a page of its own.
_INLINE_BYTES = 1024


class ExternalData:
    """Writes tensors to `folder/file_name` and returns the protos that point at them.

    Use it as a context manager; leaving it closes the file.
    """

    def __init__(self, folder: Path, file_name: str) -> None:
        self._path = folder / file_name
        self._stream: BinaryIO

    def __enter__(self) -> Self:
        self._stream = self._path.open("wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()

    def add(self, name: str, array: NDArray[np.generic]) -> onnx.TensorProto:
        """Append one array; small ones stay inside the returned proto."""
        array = np.ascontiguousarray(array)
        if array.nbytes < _INLINE_BYTES:
            return onnx.numpy_helper.from_array(array, name)
        start = -(-self._stream.tell() // _ALIGNMENT) * _ALIGNMENT
        self._stream.seek(start)
        self._stream.write(array.data)
        proto = onnx.TensorProto(
            name=name,
            data_type=onnx.helper.np_dtype_to_tensor_dtype(array.dtype),
            dims=array.shape,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        entries = (("location", self._path.name), ("offset", start), ("length", array.nbytes))
        for key, value in entries:
            proto.external_data.add(key=key, value=str(value))
        return proto
