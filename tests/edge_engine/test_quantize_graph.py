"""Linear layers of foreign graphs."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_engine.quantize_graph import quantize_graph

RNG = np.random.default_rng(5)
K, N = 72, 40
X = RNG.standard_normal((3, K)).astype(np.float32)
WEIGHT = RNG.standard_normal((K, N)).astype(np.float32)
BIAS = RNG.standard_normal(N).astype(np.float32)


def graph(nodes: list[onnx.NodeProto], **constants: np.ndarray) -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    made = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, ["M", K])],
        [info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def run(model: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": X})
    return np.asarray(y)


LAYERS = {
    "matmul": graph([helper.make_node("MatMul", ["x", "w"], ["y"])], w=WEIGHT),
    "matmul-of-a-transpose": graph(
        [
            helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", "wt"], ["y"]),
        ],
        w=np.ascontiguousarray(WEIGHT.T),
    ),
    "gemm-with-bias": graph([helper.make_node("Gemm", ["x", "w", "b"], ["y"])], w=WEIGHT, b=BIAS),
    "gemm-transposed": graph(
        [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], w=np.ascontiguousarray(WEIGHT.T)
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_linear_layer_becomes_int8_and_keeps_its_meaning(layer: str) -> None:
    exact = run(LAYERS[layer])
    model = onnx.ModelProto()
    model.CopyFrom(LAYERS[layer])
    assert quantize_graph(model) == 1
    (node,) = model.graph.node
    assert node.op_type == "MatMulNBits"
    assert "w" not in {tensor.name for tensor in model.graph.initializer}
    assert np.abs(run(model) - exact).mean() < 0.02 * np.abs(exact).mean()


SQUARE = RNG.standard_normal((K, K)).astype(np.float32)
LEFT_ALONE = {
    "two activations": [
        helper.make_node("Transpose", ["x"], ["xt"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "xt"], ["y"]),
    ],
    "constant on the left": [
        helper.make_node("Transpose", ["x"], ["xt"], perm=[1, 0]),
        helper.make_node("MatMul", ["w", "xt"], ["y"]),
    ],
    "scaled product": [helper.make_node("Gemm", ["x", "w"], ["y"], alpha=0.5)],
    "transposed activation": [
        helper.make_node("Transpose", ["x"], ["xt"], perm=[1, 0]),
        helper.make_node("Gemm", ["xt", "w"], ["y"], transA=1),
    ],
    "bias that is computed": [
        helper.make_node("ReduceMean", ["x"], ["m"], keepdims=0),
        helper.make_node("Gemm", ["x", "w", "m"], ["y"]),
    ],
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_no_plain_linear_layer_is_left_alone(case: str) -> None:
    model = graph(LEFT_ALONE[case], w=SQUARE)
    before = run(model)
    assert quantize_graph(model) == 0
    np.testing.assert_array_equal(run(model), before)


def test_a_weight_that_is_also_an_embedding_stays_for_its_other_reader() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Gather", ["w", "zero"], ["row"]),
        helper.make_node("Add", ["h", "row"], ["y"]),
    ]
    model = graph(nodes, w=WEIGHT, zero=np.array([0], np.int64))
    assert quantize_graph(model) == 1
    assert "w" in {tensor.name for tensor in model.graph.initializer}
    run(model)
