"""8-bit weights in blocks of 32 inputs, laid out for `com.microsoft.MatMulNBits`.

A block keeps 32 bytes, one float32 scale and one zero point: `w = (value - zero_point) * scale`.
Zero points cost nothing in ONNX Runtime's kernels (measured on 1.32 at 1 and 64 rows) and let a
block use all 256 levels.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BITS = 8
BLOCK = 32
"""Inputs that share one scale. 64 is 5-15 % faster and about 1.3 times less exact."""
BYTES_PER_WEIGHT = 1 + 5 / BLOCK
"""A byte each, and a float32 scale and a zero point for every block."""

# Level counts tried for a block. Checkpoints that were 4-bit before have 16 evenly spaced values
# in a block of 32; a scale of 1/k of their spacing hits every one of them, and with several k to
# choose from one also brings zero close to a level. Other blocks are best served by 255.
_SPANS = tuple(15 * k for k in range(17, 8, -1))
# Rows converted at once: bounds the working memory to a few times this many weights.
_WEIGHTS_AT_ONCE = 4 * 2**20


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One `[N, K]` weight: `values` uint8 `[N, blocks, 32]`, the others `[N, blocks]`."""

    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8]

    def dequantize(self, inputs: int) -> NDArray[np.float32]:
        """Return the float32 weight `[N, inputs]` that the kernels compute with."""
        centred = self.values.astype(np.float32) - self.zero_points[..., None].astype(np.float32)
        rows = centred.shape[0]
        return (centred * self.scales[..., None]).reshape(rows, -1)[:, :inputs]


def quantize_weight(weight: NDArray[np.float32]) -> QuantizedWeight:
    """Quantise a `[N, K]` weight; K is padded with zeros to whole blocks.

    Each block takes the candidate with the smallest squared error: symmetric around zero (exact
    for weights that came from Q8_0), or from its minimum to its maximum with one of several level
    counts (exact but for the zero point for weights that came from Q4_0 and Q4_1).
    """
    rows, inputs = weight.shape
    blocks = -(-inputs // BLOCK)
    values = np.empty((rows, blocks, BLOCK), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    zero_points = np.empty((rows, blocks), np.uint8)
    step = max(1, _WEIGHTS_AT_ONCE // (blocks * BLOCK))
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        padded = np.zeros((part.stop - part.start, blocks * BLOCK), np.float32)
        padded[:, :inputs] = weight[part]
        chunk = padded.reshape(-1, BLOCK)
        scale, zero = _best_grid(chunk)
        quantized = np.rint(chunk / scale[:, None])
        quantized += zero[:, None]
        values[part] = np.clip(quantized, 0, 255).reshape(-1, blocks, BLOCK)
        scales[part] = scale.reshape(-1, blocks)
        zero_points[part] = zero.reshape(-1, blocks)
    return QuantizedWeight(values, scales, zero_points)


def _best_grid(
    blocks: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return scale and zero point `[blocks]` with the smallest squared error for each block."""
    # A level must be exactly zero, or padding and pruned weights would not stay zero.
    low = np.minimum(blocks.min(axis=1), 0)
    high = np.maximum(blocks.max(axis=1), 0)
    # Blocks of zeros, and of numbers too small to divide by, become zeros.
    smallest = np.float32(1e-30)
    best_scale = np.maximum(np.maximum(-low, high) / 127, smallest)
    best_zero = np.full_like(best_scale, 128)
    best_error = _error(blocks, best_scale, best_zero)
    for span in _SPANS:
        scale = np.maximum((high - low) / span, smallest)
        zero = np.rint(-low / scale)
        error = _error(blocks, scale, zero)
        better = error < best_error
        best_scale = np.where(better, scale, best_scale)
        best_zero = np.where(better, zero, best_zero)
        best_error = np.where(better, error, best_error)
    return best_scale, best_zero


def _error(
    blocks: NDArray[np.float32], scale: NDArray[np.float32], zero: NDArray[np.float32]
) -> NDArray[np.float32]:
    quantized = np.rint(blocks / scale[:, None])
    np.clip(quantized, -zero[:, None], 255 - zero[:, None], out=quantized)
    quantized *= scale[:, None]
    quantized -= blocks
    error: NDArray[np.float32] = np.einsum("ij,ij->i", quantized, quantized)
    return error
