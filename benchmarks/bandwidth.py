"""The bound on decoding: how fast this machine reads, and how much a token has to read."""

import ctypes
import math
import threading
import time
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

MEMORY_BYTES = 1 << 30
"""A buffer that no last-level cache holds."""
_ROW_READS = {"Gather": {0}, "GroupQueryAttention": {7, 8}}
"""Inputs of which a token reads one row: embedding table, rotary tables."""

_memchr = ctypes.CDLL(None).memchr
_memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memchr.restype = ctypes.c_void_p


def read_bandwidth(size: int, threads: int, seconds: float = 0.5) -> float:
    """Return bytes per second at which threads read a buffer together, the best of its passes.

    Each thread looks for a byte that is not there in its own part, with the C library's vectorised
    memchr: it reads every byte once, writes nothing and computes next to nothing. `ctypes` holds
    no lock meanwhile.

    Args:
        size: Bytes of the buffer.
        threads: How many read at once.
        seconds: How long to go on.
    """
    buffer = np.full(size, 255, np.uint8)  # written, since untouched zeros are all one page
    parts = np.array_split(buffer, threads)
    best = math.inf
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        best = min(best, _pass(parts))
    return size / best


def read_limit(weights: int, threads: int) -> float:
    """Return the bytes per second that bound decoding: the faster of two readings.

    From a buffer too large for any cache, and from one of the weights' size, which a large cache
    may hold between two tokens.
    """
    return max(read_bandwidth(MEMORY_BYTES, threads), read_bandwidth(weights, threads))


def _pass(parts: list[NDArray[np.uint8]]) -> float:
    """Read all parts at once; return the seconds from the first start to the last end."""
    barrier = threading.Barrier(len(parts))
    spans: list[tuple[float, float]] = []

    def read(part: NDArray[np.uint8]) -> None:
        barrier.wait()
        began = time.perf_counter()
        _memchr(part.ctypes.data, 1, part.nbytes)
        spans.append((began, time.perf_counter()))

    readers = [threading.Thread(target=read, args=(part,)) for part in parts]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def bytes_per_token(graph: Path) -> int:
    """Return the bytes of weights that a graph reads for every token, scales and head included."""
    model = onnx.load(graph, load_external_data=False).graph
    by_row = {
        node.input[place]
        for node in model.node
        for place in _ROW_READS.get(node.op_type, ())
        if place < len(node.input)
    }
    return sum(
        onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize * math.prod(tensor.dims)
        for tensor in model.initializer
        if tensor.name not in by_row
    )
