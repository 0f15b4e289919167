"""Turn a decoder's residual stream, so that no channel of it stands out.

A few channels of a trained decoder are tens of times larger than the others, and a quantised row
spends its levels on them. What flows between the layers may be turned like any vector space: the
embedding writes turned vectors, every layer reads them turned back and turns what it adds. RMSNorm
keeps lengths, so that nothing else changes once its weights have moved into the layers that read
it (QuaRot, arXiv 2404.00456). In a random direction every channel is a mixture of all, and the
rows are as even as random numbers. On the built-in model that takes the divergence caused by 8-bit
rows from 0.025 to 0.002. What a head of attention gives back may be turned as well, by turning the
values it takes in. All that costs nothing at run time.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edge_engine.arch import LlamaShape
from edge_engine.weights import Weights, is_tied

_NORM_OF = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")
_EMBEDDING = "model.embed_tokens.weight"
_LAST_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"


class RotatedWeights:
    """The weights of a decoder with the same logits, in another basis. It has a head of its own.

    Norms between the layers have weights of 1.

    Args:
        weights: The decoder.
        shape: Its numbers.
    """

    def __init__(self, weights: Weights, shape: LlamaShape) -> None:
        self.config = weights.config
        self.elements = dict(weights.elements)
        self._weights = weights
        self._head = _EMBEDDING if is_tied(weights, shape) else _HEAD
        if self._head in self.elements:
            self.elements[_HEAD] = self.elements[self._head]
        self._rotation = Rotation(shape.hidden)
        self._head_rotation = Rotation(shape.head_dim)
        self.shape = replace(shape, tied=False)

    def read(self, name: str) -> NDArray[np.float32]:
        """Return one tensor.

        Raises:
            KeyError: the decoder has no such tensor.
        """
        turn = self._rotation.turn
        if name == _EMBEDDING:
            return turn(self._weights.read(name))
        if name == _HEAD:
            return turn(self._weights.read(self._head) * self._weights.read(_LAST_NORM))
        values = self._weights.read(name)
        if name == _LAST_NORM or name.endswith("_layernorm.weight"):
            return np.ones_like(values)
        layer, kind = name.rsplit(".", 1)
        if layer.endswith("v_proj"):
            values = self._turn_heads(values.T).T
        elif layer.endswith("o_proj") and kind == "weight":
            values = self._turn_heads(values)
        if layer.endswith(_WRITERS):
            return turn(values) if kind == "bias" else turn(values.T).T
        if layer.endswith("_proj") and kind == "weight":
            prefix, block, _ = layer.rsplit(".", 2)
            return turn(values * self._weights.read(f"{prefix}.{_NORM_OF[block]}.weight"))
        return values

    def _turn_heads(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turn every head's part of rows of values, or of what attention makes of them."""
        heads = rows.reshape(-1, self.shape.head_dim)
        turned: NDArray[np.float32] = self._head_rotation.turn(heads).reshape(rows.shape)
        return turned


class Rotation:
    """A random orthogonal matrix whose product is cheap: `signs * (Hadamard (x) dense)`.

    The dense factor has about the square root of the size. It is the same on every machine.

    Args:
        size: Rows and columns.
    """

    def __init__(self, size: int) -> None:
        rng = np.random.default_rng(size)
        blocks = 1
        while size % (2 * blocks) == 0 and 4 * blocks * blocks <= size:
            blocks *= 2
        dense, _ = np.linalg.qr(rng.standard_normal((size // blocks, size // blocks)))
        self._hadamard = hadamard(blocks)
        self._dense = dense.astype(np.float32)
        self._signs = rng.choice(np.array([-1, 1], np.float32), size)

    def turn(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return `rows @ matrix`, for one row or several."""
        grid = (rows * self._signs).reshape(-1, len(self._hadamard), len(self._dense))
        turned: NDArray[np.float32] = self._hadamard @ (grid @ self._dense)
        return turned.reshape(rows.shape)


def hadamard(size: int) -> NDArray[np.float32]:
    """Return a symmetric orthogonal matrix whose numbers are all of the same magnitude.

    Args:
        size: Rows and columns, a power of 2.
    """
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    orthogonal: NDArray[np.float32] = (matrix / np.sqrt(size)).astype(np.float32)
    return orthogonal
