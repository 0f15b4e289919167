"""8-bit blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_engine.quantize import BLOCK, QuantizedWeight, quantize_weight

RNG = np.random.default_rng(11)


def dequantized(blocks: QuantizedWeight, inputs: int) -> np.ndarray:
    """Return the float32 weight `[N, inputs]` that the kernels compute with."""
    centred = blocks.values.astype(np.float32) - blocks.zero_points[..., None].astype(np.float32)
    return (centred * blocks.scales[..., None]).reshape(len(centred), -1)[:, :inputs]


def relative_error(weight: np.ndarray) -> float:
    restored = dequantized(quantize_weight(weight), weight.shape[1])
    return float(np.sqrt(np.square(restored - weight).mean() / np.square(weight).mean()))


def test_random_weights_lose_half_a_percent_at_most() -> None:
    assert relative_error(RNG.standard_normal((48, 320)).astype(np.float32)) < 0.005


def test_a_block_on_one_side_of_zero_uses_all_its_levels() -> None:
    weight = (1 + RNG.random((16, 64))).astype(np.float32)
    assert relative_error(weight) < 0.002


@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 72])
def test_inputs_that_fill_no_whole_block_are_padded(inputs: int) -> None:
    weight = RNG.standard_normal((3, inputs)).astype(np.float32)
    blocks = quantize_weight(weight)
    assert blocks.values.shape == (3, -(-inputs // BLOCK), BLOCK)
    assert dequantized(blocks, inputs).shape == weight.shape
    assert relative_error(weight) < 0.01


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 70)),
        elements=st.floats(-1e4, 1e4, width=32),
    )
)
def test_no_weight_moves_by_more_than_its_blocks_step(weight: np.ndarray) -> None:
    blocks = quantize_weight(weight)
    steps = np.repeat(blocks.scales, BLOCK, axis=1)[:, : weight.shape[1]]
    moved = np.abs(dequantized(blocks, weight.shape[1]) - weight)
    assert (moved <= steps * 1.001 + 1e-29).all()
    assert (moved[weight == 0] == 0).all()
