"""Linear layers in 8-bit integers, with the same numbers however many rows there are.

Integers add up to the same sum in any order. So a row of a product does not depend on the others,
and the runtime may treat one row, eight rows and a chunk of a prompt each in the way that is
fastest; everything else here works on one number or on one row at a time. Weights are signed bytes
with a scale for each output. Activations become unsigned bytes around 128 in one of two ways:

- *Wide*, with 16 bits: a first byte for the whole range and a second for what the first leaves
  over. The two are two rows of one product, which takes no longer than one row, since reading the
  weight is what takes the time. The range is known beforehand: in a row whose root mean square is 1,
  no number exceeds the square root of the row's length. A row that does not come from a norm is
  brought to that size before the product and back to its own afterwards.
- *Narrow*, with 8 bits: half the work in long prompts, so it is for the largest layers, and
  possible because `edge_engine.rotate` has made their inputs even. More than half of such a row is
  the same for every token. That is taken off before the product and put back after it, and what is
  left needs half the range, which a calibration run has measured.

On the built-in model narrow inputs of gate and up cause a divergence of 0.0012 and make prompts
15 % faster; all inputs narrow would cause one of 0.03.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_engine.gptq import RoundedWeight, round_weight
from edge_engine.graph_writer import CONTRIB_DOMAIN, GraphWriter

UNIT_VALUES = frozenset({"normed", "mlp_normed"})
"""Values whose rows have a root mean square of 1, once norms have weights of 1."""
NARROW_VALUES = frozenset({"mlp_normed"})
"""Values that take 8 bits where a calibration run has seen them."""

_ZERO = 128
_HIGHEST = 127
_FINER = 256
"""Steps of a wide value's second byte in one of its first."""
_MARGIN = 1.1
"""How far a narrow value may go beyond what the calibration run has seen; the rest is cut off."""
_EPSILON = 1e-12
"""Added to the mean square of a row, so that rows of zeros can be divided by it."""


class Int8Linear:
    """A `Linear` of integer products, for weights that `edge_engine.rotate` has turned.

    Args:
        activations: For values by name, rows `[tokens, K]` of a calibration run. Weights that read
            a value without them are rounded to the nearest level, and the value is wide.
        saturates: What `products_saturate` says of the machine that is to run the graph.
    """

    def __init__(
        self,
        activations: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
        *,
        saturates: bool,
    ) -> None:
        self._activations = activations
        self._saturates = saturates

    def __call__(
        self,
        graph: GraphWriter,
        name: str,
        value: str,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None,
    ) -> None:
        """Write one product; see `Linear`."""
        layer = _Layer(graph, name, self._saturates)
        kind = value.rpartition("_")[0]
        rows = self._activations.get(value)
        if rows is not None and kind in NARROW_VALUES:
            layer.narrow(value, weight, bias, rows)
            return
        rounded = round_weight(weight, rows)
        product = name if bias is None else f"{name}_product"
        if kind in UNIT_VALUES:
            layer.wide(value, rounded, product)
        else:
            layer.wide_of_any_size(value, rounded, product)
        if bias is not None:
            graph.node("Add", [product, graph.tensor(f"{name}_bias", bias)], [name])


@dataclass(frozen=True, slots=True)
class _Layer:
    """Writes the nodes of one layer; `name` is its result and the beginning of all its names."""

    graph: GraphWriter
    name: str
    saturates: bool

    def narrow(
        self,
        value: str,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None,
        rows: NDArray[np.float32],
    ) -> None:
        name, tensor = self.name, self.graph.tensor
        mean = rows.mean(axis=0)
        left = rows - mean
        of_mean = weight @ mean
        # Rows of size 1 reach further than 1, whatever a short calibration run has seen.
        reach = max(1, _MARGIN * float(np.abs(left).max()))
        self.graph.node("Sub", [value, tensor(f"{name}_mean", mean)], [f"{name}_left"])
        self._multiply(
            self._bytes(
                f"{name}_left", tensor(f"{name}_step", np.array(reach / _HIGHEST, np.float32))
            ),
            f"{name}_step",
            round_weight(weight, left),
            name,
            constant=tensor(f"{name}_constant", of_mean if bias is None else of_mean + bias),
        )

    def wide_of_any_size(self, value: str, weight: RoundedWeight, product: str) -> None:
        name, inputs = self.name, weight.values.shape[1]
        unit, factor, of_unit = (f"{name}_{part}" for part in ("unit", "factor", "of_unit"))
        self.graph.node(
            "SimplifiedLayerNormalization",
            [value, self.graph.tensor(f"ones_{inputs}", np.ones(inputs, np.float32))],
            [unit, factor],  # unit = value * factor
            axis=-1,
            epsilon=_EPSILON,
            stash_type=1,
        )
        self.wide(unit, weight, of_unit)
        self.graph.node("Div", [of_unit, factor], [product])

    def wide(self, value: str, weight: RoundedWeight, product: str) -> None:
        name, node, tensor = self.name, self.graph.node, self.graph.tensor
        outputs, inputs = weight.values.shape
        first_step = np.float32(np.sqrt(inputs) / _HIGHEST)
        step = tensor(f"first_step_{inputs}", np.array(first_step))
        fine = tensor(f"second_step_{inputs}", np.array(first_step / _FINER, np.float32))
        first = self._bytes(value, step)
        node("DequantizeLinear", [first, step, "zero"], [f"{name}_first"])
        node("Sub", [value, f"{name}_first"], [f"{name}_rest"])
        second = self._bytes(f"{name}_rest", fine)
        node("Concat", [first, second], [f"{name}_both_bytes"], axis=0)
        self._multiply(f"{name}_both_bytes", fine, weight, f"{name}_both")
        # 256 times the rows of first bytes and once those of second bytes, in one pass. The sum is
        # exact but for its last rounding, so that no kernel can do it in another way.
        halves = tensor("halves", np.array([2, -1], np.int64))
        weights = tensor("weights_of_halves", np.array([[_FINER, 1]], np.float32))
        rows = tensor(f"rows_of_{outputs}", np.array([-1, outputs], np.int64))
        node("Reshape", [f"{name}_both", halves], [f"{name}_halves"])
        node("MatMul", [weights, f"{name}_halves"], [f"{name}_sum"])
        node("Reshape", [f"{name}_sum", rows], [product])

    def _bytes(self, value: str, step: str) -> str:
        zero = self.graph.tensor("zero", np.array(_ZERO, np.uint8))
        self.graph.node("QuantizeLinear", [value, step, zero], [f"{value}_bytes"])
        return f"{value}_bytes"

    def _multiply(
        self, value: str, step: str, weight: RoundedWeight, product: str, *, constant: str = ""
    ) -> None:
        name, tensor = self.name, self.graph.tensor
        values: NDArray[np.int8] | NDArray[np.uint8] = weight.values.T
        if self.saturates:
            values = values.view(np.uint8) ^ np.uint8(_ZERO)
        inputs = [
            value,
            tensor(f"{name}_weight", values),
            step,
            tensor(f"{name}_scales", weight.scales),
            "zero",
            "zero" if self.saturates else "",
            constant,
        ]
        self.graph.node("MatMulIntegerToFloat", inputs, [product], domain=CONTRIB_DOMAIN)


def products_saturate() -> bool:
    """Return whether this machine multiplies unsigned with signed bytes wrongly.

    x86 processors without VNNI add pairs of products up in 16 bits, where large sums are cut off
    (microsoft/onnxruntime#6004). There weights must be unsigned as well, which takes other kernels
    and changes no number.
    """
    rows, inputs, outputs = 2, 64, 16
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["y"])],
        "probe",
        [
            info("a", TensorProto.UINT8, [rows, inputs]),
            info("b", TensorProto.INT8, [inputs, outputs]),
        ],
        [info("y", TensorProto.INT32, [rows, outputs])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    largest = {
        "a": np.full((rows, inputs), 255, np.uint8),
        "b": np.full((inputs, outputs), _HIGHEST, np.int8),
    }
    (products,) = session.run(None, largest)
    return bool((products != inputs * 255 * _HIGHEST).any())
