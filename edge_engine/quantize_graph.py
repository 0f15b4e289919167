"""Turn the linear layers of any float32 graph into 8-bit blocks."""

from collections import Counter

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edge_engine.graph_writer import CONTRIB_DOMAIN
from edge_engine.nbits import nbits_node
from edge_engine.quantize import quantize_weight


def quantize_graph(model: onnx.ModelProto) -> int:
    """Replace each MatMul and Gemm with a constant 2-D weight by MatMulNBits, in place.

    Weights may be initializers or transposes of one. Everything else, embeddings among it, stays
    as it is.

    Returns:
        How many nodes were replaced.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    transposed = {
        node.output[0]: constants[node.input[0]]
        for node in graph.node
        if node.op_type == "Transpose"
        and node.input[0] in constants
        and _attributes(node).get("perm", [1, 0]) == [1, 0]
    }
    replaced = 0
    for index, node in enumerate(graph.node):
        weight = _weight(node, constants, transposed)
        if weight is None:
            continue
        blocks = quantize_weight(np.ascontiguousarray(weight, dtype=np.float32))
        name = node.output[0]
        parts = {
            f"{name}_weight": blocks.values,
            f"{name}_scales": blocks.scales,
            f"{name}_zeros": blocks.zero_points,
        }
        graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in parts.items())
        bias = node.input[2] if len(node.input) > 2 else None
        quantized = nbits_node(node.input[0], list(parts), bias, name, weight.shape)
        graph.node[index].CopyFrom(quantized)
        replaced += 1
    _drop_unused(graph)
    if replaced and not any(opset.domain == CONTRIB_DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONTRIB_DOMAIN, 1))
    return replaced


def _weight(
    node: onnx.NodeProto,
    constants: dict[str, onnx.TensorProto],
    transposed: dict[str, onnx.TensorProto],
) -> NDArray[np.float32] | None:
    """Return the node's weight as `[N, K]`, or None if it is no linear layer with one."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    attributes = _attributes(node)
    if attributes.get("transA", 0) or attributes.get("alpha", 1) != 1:
        return None
    if len(node.input) > 2:
        bias = constants.get(node.input[2])
        if bias is None or len(bias.dims) != 1 or attributes.get("beta", 1) != 1:
            return None
    rows_are_outputs = bool(attributes.get("transB", 0))
    tensor = constants.get(node.input[1])
    if tensor is None and node.input[1] in transposed:
        tensor = transposed[node.input[1]]
        rows_are_outputs = not rows_are_outputs
    if tensor is None or len(tensor.dims) != 2 or tensor.data_type != onnx.TensorProto.FLOAT:
        return None
    values: NDArray[np.float32] = numpy_helper.to_array(tensor)
    return values if rows_are_outputs else values.T


def _attributes(node: onnx.NodeProto) -> dict[str, object]:
    return {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Remove transposes and initializers that nothing reads any more."""
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(output.name for output in graph.output)
    for node in [n for n in graph.node if n.op_type == "Transpose" and not uses[n.output[0]]]:
        uses[node.input[0]] -= 1
        graph.node.remove(node)
    for tensor in [t for t in graph.initializer if not uses[t.name]]:
        graph.initializer.remove(tensor)
