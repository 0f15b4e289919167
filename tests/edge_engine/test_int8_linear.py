"""Integer products: what they compute, and that rows do not depend on each other."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edge_engine import int8_linear
from edge_engine.external_data import ExternalData
from edge_engine.gptq import round_weight
from edge_engine.graph_writer import GraphWriter
from edge_engine.int8_linear import Int8Linear, products_saturate
from edge_engine.rotate import hadamard
from edge_engine.session import open_session

K, N = 192, 200
RNG = np.random.default_rng(2)
WEIGHT = RNG.standard_normal((N, K)).astype(np.float32)
BIAS = RNG.standard_normal(N).astype(np.float32)
ROWS = RNG.standard_normal((128, K)).astype(np.float32)
UNIT_ROWS = ROWS / np.sqrt(np.square(ROWS).mean(axis=1, keepdims=True))
ROWS_OF_ALL_SIZES = ROWS * np.geomspace(1e-3, 1e3, len(ROWS), dtype=np.float32)[:, None]
ALIKE_ROWS = UNIT_ROWS[::-1] + 1
SEEN: dict[str, np.ndarray] = {
    "mlp_normed_3": ALIKE_ROWS[:64],
    "attended_rows_3": ROWS_OF_ALL_SIZES[::2],
    "product_3": ROWS_OF_ALL_SIZES[::2],
}
"""Rows of a calibration run."""

# One value for each way of making bytes, with rows as they come there: those seen are narrow.
VALUES: dict[str, np.ndarray] = {
    "normed_7": UNIT_ROWS,
    "product_7": ROWS_OF_ALL_SIZES,
    "mlp_normed_3": ALIKE_ROWS,
    "attended_rows_3": ROWS_OF_ALL_SIZES,
    "product_3": ROWS_OF_ALL_SIZES,
}


class Product:
    """A graph with one product."""

    def __init__(
        self,
        folder: Path,
        value: str,
        *,
        bias: np.ndarray | None = BIAS,
        activations: Mapping[str, np.ndarray] = SEEN,
        name: str = "y",
        saturates: bool = False,
    ) -> None:
        with ExternalData(folder, "weights") as data:
            graph = GraphWriter(data)
            linear = Int8Linear(activations, saturates=saturates)
            linear(graph, name, value, WEIGHT, bias)
            info = helper.make_tensor_value_info
            model = graph.model(
                [info(value, TensorProto.FLOAT, ["rows", K])],
                [info(name, TensorProto.FLOAT, ["rows", N])],
            )
        self.kinds = [node.op_type for node in model.graph.node]
        (folder / "graph").write_bytes(model.SerializeToString())
        self._session = open_session(folder / "graph", threads=2)
        self._value = value

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        y: np.ndarray = self._session.run(None, {self._value: np.ascontiguousarray(rows)})[0]
        return y


def levels(rows: np.ndarray, step: np.ndarray | float) -> np.ndarray:
    return np.clip(np.rint(rows / step), -128, 127)


def wide(rows: np.ndarray) -> np.ndarray:
    """Return what is left of rows of size 1 in two bytes."""
    step = np.float32(np.sqrt(K) / 127)
    fine = step / 256
    first = levels(rows, step) * step
    return first + levels(rows - first, fine) * fine


def narrow_product(rows: np.ndarray, weight: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return the product of what is left of rows in one byte."""
    step = 0.9 * np.abs(seen).max() / 127
    rounded = round_weight(weight.astype(np.float32), seen.astype(np.float32)).restored()
    product: np.ndarray = levels(rows, step) * step @ rounded.T
    return product


def turned(rows: np.ndarray) -> np.ndarray:
    """Return the rows with all blocks of 64 numbers turned."""
    turned: np.ndarray = rows @ np.kron(np.eye(K // 64), hadamard(64))
    return turned


def expected(value: str, rows: np.ndarray) -> np.ndarray:
    """Return the product as the module's description has it, in float64."""
    rows = rows.astype(np.float64)
    seen = SEEN.get(value)
    if seen is None:
        size = sizes(rows) if value.startswith("product") else 1.0
        return size * (wide(rows / size) @ round_weight(WEIGHT).restored().T) + BIAS
    if value.startswith("mlp_normed"):
        mean = seen.mean(axis=0)
        return narrow_product(rows - mean, WEIGHT, seen - mean) + WEIGHT @ mean + BIAS
    size, weight = sizes(rows), WEIGHT
    unit, seen = rows / size, seen / sizes(seen)
    if value.startswith("product"):
        unit, seen, weight = turned(unit), turned(seen), turned(weight)
    return size * narrow_product(unit, weight, seen) + BIAS


def sizes(rows: np.ndarray) -> np.ndarray:
    """Return the root mean square of each row."""
    found: np.ndarray = np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + 1e-12)
    return found


def close(y: np.ndarray, wanted: np.ndarray, tolerance: float) -> bool:
    """Return whether no number is off by more than a share of its row's size."""
    size = np.sqrt(np.square(wanted).mean(axis=1, keepdims=True))
    return bool((np.abs(y - wanted) <= tolerance * size).all())


@pytest.mark.parametrize("value", VALUES)
def test_a_product_is_that_of_the_bytes(value: str, tmp_path: Path) -> None:
    # A number between two levels may be rounded either way: half a second byte, or a whole level.
    tolerance = 0.02 if value in SEEN else 2e-4
    rows = VALUES[value]
    assert close(Product(tmp_path, value)(rows), expected(value, rows), tolerance)


@pytest.mark.parametrize("value", VALUES)
def test_a_row_has_the_same_bits_in_any_company(value: str, tmp_path: Path) -> None:
    product, rows = Product(tmp_path, value), VALUES[value]
    whole = product(rows)
    for count in (1, 2, 3, 8, 17, 64):
        for first in (0, 50):
            part = slice(first, first + count)
            np.testing.assert_array_equal(product(rows[part]), whole[part])


@pytest.mark.parametrize("value", VALUES)
def test_no_rows_make_no_rows(value: str, tmp_path: Path) -> None:
    assert Product(tmp_path, value)(VALUES[value][:0]).shape == (0, N)


@pytest.mark.parametrize("value", VALUES)
def test_unsigned_weights_change_no_bit(value: str, tmp_path: Path) -> None:
    rows = VALUES[value]
    found = []
    for saturates in (False, True):
        folder = tmp_path / str(saturates)
        folder.mkdir()
        found.append(Product(folder, value, saturates=saturates)(rows))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("value", VALUES)
def test_the_runtime_leaves_the_nodes_as_they_are(value: str, tmp_path: Path) -> None:
    """Its optimiser knows pairs of QuantizeLinear and DequantizeLinear, and might take one out."""
    product, rows = Product(tmp_path, value), VALUES[value]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = ort.InferenceSession(
        str(tmp_path / "graph"), options, providers=["CPUExecutionProvider"]
    )
    np.testing.assert_array_equal(plain.run(None, {value: rows})[0], product(rows))


@pytest.mark.parametrize("value", ["normed_7", "product_7"])
def test_two_bytes_are_as_good_as_floats(value: str, tmp_path: Path) -> None:
    rows = VALUES[value]
    exact = rows.astype(np.float64) @ round_weight(WEIGHT).restored().T
    assert close(Product(tmp_path, value, bias=None)(rows), exact, 1e-3)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), outlier=st.floats(-1e6, 1e6), size=st.floats(1e-4, 1e4))
def test_an_outlier_takes_little_from_its_row(seed: int, outlier: float, size: float) -> None:
    """Two bytes leave 13 bits even for a row with a number as large as all others together."""
    row = np.random.default_rng(seed).standard_normal((1, K)) * size
    row[0, seed % K] = outlier
    unit = row / np.sqrt(np.square(row).mean())
    assert np.abs(wide(unit.astype(np.float32)) - unit).max() <= np.sqrt(K) / 127 / 256 * 1.01


@pytest.mark.parametrize("value", ["product_7", "attended_rows_3", "product_3"])
def test_a_row_of_zeros_gives_the_bias(value: str, tmp_path: Path) -> None:
    y = Product(tmp_path, value)(np.zeros((2, K), np.float32))
    np.testing.assert_array_equal(y, [BIAS, BIAS])


def test_what_a_calibration_run_has_not_seen_is_cut_off(tmp_path: Path) -> None:
    product = Product(tmp_path, "mlp_normed_3")
    far = SEEN["mlp_normed_3"].mean(axis=0) + np.array([[50], [5000]], np.float32)
    y = product(far)
    np.testing.assert_array_equal(y[0], y[1])


@pytest.mark.parametrize("value", ["mlp_normed_3", "attended_rows_3", "product_3"])
def test_a_value_that_was_not_seen_is_wide(value: str, tmp_path: Path) -> None:
    assert "DequantizeLinear" in Product(tmp_path, value, activations={}).kinds
    assert "DequantizeLinear" not in Product(tmp_path, value).kinds


def test_the_vocabulary_reads_wide_values(tmp_path: Path) -> None:
    assert "DequantizeLinear" in Product(tmp_path, "mlp_normed_3", name="logits").kinds


@pytest.mark.parametrize("length", [64, 96])
def test_uneven_rows_that_are_no_blocks_are_wide(length: int, tmp_path: Path) -> None:
    rows, weight = ROWS[:, :length], WEIGHT[:, :length]
    with ExternalData(tmp_path, "weights") as data:
        graph = GraphWriter(data)
        Int8Linear({"product_3": rows}, saturates=False)(graph, "y", "product_3", weight, None)
        nodes = graph.model([], []).graph.node
    assert "DequantizeLinear" in [node.op_type for node in nodes]


def test_a_channel_that_stands_out_leaves_levels_to_the_others(tmp_path: Path) -> None:
    rows = ROWS.copy()
    rows[:, 5] *= 100
    exact = rows.astype(np.float64) @ WEIGHT.T
    y = Product(tmp_path, "product_3", bias=None, activations={"product_3": rows[:64]})(rows)
    errors = np.sqrt(np.square(y - exact).mean(axis=1)) / sizes(exact)[:, 0]
    assert np.median(errors) < 0.02


def test_rows_that_are_all_alike_leave_a_range(tmp_path: Path) -> None:
    alike = {"mlp_normed_3": np.ones((5, K), np.float32)}
    y = Product(tmp_path, "mlp_normed_3", activations=alike, bias=None)(np.ones((1, K), np.float32))
    np.testing.assert_allclose(y[0], WEIGHT.sum(axis=1), rtol=1e-4, atol=1e-3)


class FakeSession:
    """A runtime that cuts sums of two products off at 16 bits."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def run(self, _: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        a, b = (feeds[name].astype(np.int32) for name in "ab")
        pairs = a[:, ::2, None] * b[None, ::2] + a[:, 1::2, None] * b[None, 1::2]
        return [np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=1)]


def test_a_processor_that_cuts_sums_off_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear.ort, "InferenceSession", FakeSession)
    assert products_saturate()


def test_a_processor_with_dot_products_of_bytes_does_not_cut_off() -> None:
    flags = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    if "vnni" not in flags and "asimddp" not in flags:
        pytest.skip("needs a processor that is known not to")
    assert not products_saturate()
