"""The node that multiplies with 8-bit blocks."""

from collections.abc import Sequence

import onnx
from onnx import helper

from edge_engine.graph_writer import CONTRIB_DOMAIN
from edge_engine.quantize import BITS, BLOCK


def nbits_node(
    value: str,
    weight: Sequence[str],
    bias: str | None,
    output: str,
    shape: tuple[int, ...],
) -> onnx.NodeProto:
    """Return `output = value @ weight.T + bias` as a MatMulNBits node.

    Args:
        value: Name of the activations `[..., K]`.
        weight: Names of a `QuantizedWeight`'s values, scales and zero points.
        bias: Name of a vector `[N]`, if there is one.
        output: Name of the result; the node's own name too.
        shape: The weight's `(N, K)`.
    """
    # Between zero points and bias lies an input for reordered groups, which we do not use.
    inputs = [value, *weight, *(() if bias is None else ("", bias))]
    return helper.make_node(
        "MatMulNBits",
        inputs,
        [output],
        name=output,
        domain=CONTRIB_DOMAIN,
        N=shape[0],
        K=shape[1],
        bits=BITS,
        block_size=BLOCK,
        # Without level 4 the CPU kernel expands the weight to float32 in every call.
        accuracy_level=4,
    )
