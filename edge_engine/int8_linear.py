"""Linear layers in 8-bit integers, with the same numbers however many rows there are.

Integers add up to the same sum in any order. So a row of a product does not depend on the others,
and the runtime may treat one row, eight rows and a chunk of a prompt each in the way that is
fastest; everything else here works on one number or on one row at a time. Weights are signed bytes
with a scale for each output. Activations become unsigned bytes around 128 in one of two ways:

- *Narrow*, with 8 bits, whose range a calibration run has measured. That is possible because
  `edge_engine.rotate` has made the rows even. What the MLP's last product reads comes from no
  weight that could be turned, so its rows are turned here, a few numbers at a time.
- *Wide*, with 16 bits: a first byte for the whole range and a second for what the first leaves
  over. The two are two rows of one product. The range is known beforehand: in a row whose root mean
  square is 1, no number exceeds the square root of the row's length. It is for the vocabulary, for
  values that no calibration run has seen, and for rows that cannot be turned.

A row that does not come from a norm is brought to a root mean square of 1 before the product and
back to its own size afterwards. Of one that does, more than half is the same for every token: that
is taken off a narrow row before the product and put back after it.

On the built-in model a graph with narrow values for gate and up alone diverges from float32 by
0.0023, this one by 0.0038. In turns, on two cores, it takes 0.89 of that one's time for a token and
0.79 for 64 tokens of a prompt.
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
from edge_engine.linear import add_bias, before_bias
from edge_engine.rotate import hadamard

UNIT_VALUES = frozenset({"normed", "mlp_normed"})
"""Values whose rows have a root mean square of 1, once norms have weights of 1."""
UNEVEN_VALUES = frozenset({"product"})
"""Values in which channels stand out, since nothing before them could be turned."""
WIDE_PRODUCTS = frozenset({"logits"})
"""Products that read wide values even where a calibration run has seen them."""

_ZERO = 128
_HIGHEST = 127
_FINER = 256
"""Steps of a wide value's second byte in one of its first."""
_KEPT_RANGE = 0.9
"""Share of the range that a calibration run has seen which a narrow value keeps. Cutting off a rare
number costs less than coarser levels for all: on the built-in model 1.1 and 0.8 cause a quarter to a
third more divergence."""
_TURNED = 64
"""Numbers of a row that are turned together. On the built-in model 16 cause four times the
divergence of 64, and 128 the same."""
_EPSILON = 1e-12
"""Added to the mean square of a row, so that rows of zeros can be divided by it."""


class Int8Linear:
    """A `Linear` of integer products, for weights that `edge_engine.rotate` has turned.

    Args:
        activations: For values by name, rows `[tokens, K]` of a calibration run. Values without
            them are wide, and their weights are rounded to the nearest level.
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
        uneven = kind in UNEVEN_VALUES
        if rows is None or name in WIDE_PRODUCTS or (uneven and not _can_turn(weight)):
            if kind in UNIT_VALUES:
                layer.wide(value, round_weight(weight, rows), bias)
            else:
                layer.wide_of_any_size(value, round_weight(weight, rows), bias)
        elif kind in UNIT_VALUES:
            layer.narrow(value, weight, bias, rows)
        elif uneven:
            layer.narrow_of_any_size(
                layer.turn(value, weight.shape[1]), _turn(weight), bias, _turn(rows)
            )
        else:
            layer.narrow_of_any_size(value, weight, bias, rows)


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
        of_mean = weight @ mean
        self.graph.node("Sub", [value, tensor(f"{name}_mean", mean)], [f"{name}_left"])
        self._multiply_narrow(
            f"{name}_left",
            weight,
            rows - mean,
            name,
            constant=tensor(f"{name}_constant", of_mean if bias is None else of_mean + bias),
        )

    def narrow_of_any_size(
        self,
        value: str,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None,
        rows: NDArray[np.float32],
    ) -> None:
        unit, factor = self._unit(value, rows.shape[1])
        unit_rows = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + _EPSILON)
        self._multiply_narrow(unit, weight, unit_rows, f"{self.name}_of_unit")
        self._resize(f"{self.name}_of_unit", factor, bias)

    def wide(self, value: str, weight: RoundedWeight, bias: NDArray[np.float32] | None) -> None:
        self._multiply_wide(value, weight, before_bias(self.name, bias))
        add_bias(self.graph, self.name, bias)

    def wide_of_any_size(
        self, value: str, weight: RoundedWeight, bias: NDArray[np.float32] | None
    ) -> None:
        unit, factor = self._unit(value, weight.values.shape[1])
        self._multiply_wide(unit, weight, f"{self.name}_of_unit")
        self._resize(f"{self.name}_of_unit", factor, bias)

    def turn(self, value: str, length: int) -> str:
        """Turn rows of a length, as `_turn` does; return the name of the result."""
        name, node, tensor = self.name, self.graph.node, self.graph.tensor
        blocks = tensor("blocks", np.array([-1, _TURNED], np.int64))
        matrix = tensor("hadamard", hadamard(_TURNED))
        node("Reshape", [value, blocks], [f"{name}_blocks"])
        node("MatMul", [f"{name}_blocks", matrix], [f"{name}_turned_blocks"])
        node("Reshape", [f"{name}_turned_blocks", self._rows_of(length)], [f"{name}_turned"])
        return f"{name}_turned"

    def _unit(self, value: str, length: int) -> tuple[str, str]:
        """Bring rows to a root mean square of 1; return names: the result, and what it took."""
        unit, factor = f"{self.name}_unit", f"{self.name}_factor"
        self.graph.node(
            "SimplifiedLayerNormalization",
            [value, self.graph.tensor(f"ones_{length}", np.ones(length, np.float32))],
            [unit, factor],
            axis=-1,
            epsilon=_EPSILON,
            stash_type=1,
        )
        return unit, factor

    def _resize(self, of_unit: str, factor: str, bias: NDArray[np.float32] | None) -> None:
        self.graph.node("Div", [of_unit, factor], [before_bias(self.name, bias)])
        add_bias(self.graph, self.name, bias)

    def _multiply_narrow(
        self,
        value: str,
        weight: NDArray[np.float32],
        rows: NDArray[np.float32],
        product: str,
        *,
        constant: str = "",
    ) -> None:
        # Rows of size 1 reach further than 1, whatever a short calibration run has seen.
        reach = max(1, _KEPT_RANGE * float(np.abs(rows).max()))
        step = self.graph.tensor(f"{self.name}_step", np.array(reach / _HIGHEST, np.float32))
        self._multiply(
            self._bytes(value, step), step, round_weight(weight, rows), product, constant=constant
        )

    def _multiply_wide(self, value: str, weight: RoundedWeight, product: str) -> None:
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
        node("Reshape", [f"{name}_both", halves], [f"{name}_halves"])
        node("MatMul", [weights, f"{name}_halves"], [f"{name}_sum"])
        node("Reshape", [f"{name}_sum", self._rows_of(outputs)], [product])

    def _rows_of(self, length: int) -> str:
        return self.graph.tensor(f"rows_of_{length}", np.array([-1, length], np.int64))

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


def _can_turn(weight: NDArray[np.float32]) -> bool:
    """Return whether a product's rows consist of blocks.

    Of several: the kernels that turn a single block add up in another order.
    """
    length = weight.shape[1]
    return bool(length % _TURNED == 0 and length > _TURNED)


def _turn(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    blocks = rows.reshape(-1, _TURNED)
    turned: NDArray[np.float32] = blocks @ hadamard(_TURNED)
    return turned.reshape(rows.shape)


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
