"""Packed weights in the data file: the same numbers, without a private copy."""

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_engine.manifest import DATA_FILE, GRAPH_FILE
from edge_engine.memory_account import _mapped_bytes, _resident
from edge_engine.packing import pack_weights, packing_key
from edge_engine.session import open_session
from edge_engine.step_memory import StepMemory
from engine_core.errors import StepMemoryError

MIB = 2**20
WEIGHT = 8 * MIB

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a graph that multiplies by 8 MiB of weights."""
    weight = np.random.default_rng(1).standard_normal((1024, 2048)).astype(np.float32)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "product",
        [info("x", TensorProto.FLOAT, ["n", 1024])],
        [info("y", TensorProto.FLOAT, ["n", 2048])],
        [numpy_helper.from_array(weight, "weight")],
    )
    opset = [helper.make_opsetid("", 18)]
    onnx.save(
        helper.make_model(graph, opset_imports=opset, ir_version=10),
        tmp_path / GRAPH_FILE,
        save_as_external_data=True,
        location=DATA_FILE,
    )
    return tmp_path


def product(session: ort.InferenceSession, rows: int) -> np.ndarray:
    values: np.ndarray = session.run(None, {"x": np.ones((rows, 1024), np.float32)})[0]
    return values


def test_packing_changes_no_number_and_no_name(folder: Path) -> None:
    before = product(open_session(folder / GRAPH_FILE, 1), 3)
    plain = (folder / DATA_FILE).stat().st_size
    pack_weights(folder)
    assert sorted(file.name for file in folder.iterdir()) == [GRAPH_FILE, DATA_FILE]
    assert (folder / DATA_FILE).stat().st_size >= plain + WEIGHT
    session = open_session(folder / GRAPH_FILE, 1)
    np.testing.assert_array_equal(product(session, 3), before)


def test_weights_that_an_older_runtime_stores_wrongly_are_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "__version__", "1.31.1")
    size = (folder / DATA_FILE).stat().st_size
    model = onnx.load(folder / GRAPH_FILE, load_external_data=False)
    model.graph.node[0].op_type = "MatMulNBits"
    (folder / GRAPH_FILE).write_bytes(model.SerializeToString())
    pack_weights(folder)
    assert (folder / DATA_FILE).stat().st_size == size


@linux_only
def test_packed_weights_are_pages_of_the_file(folder: Path) -> None:
    pack_weights(folder)
    before = _resident()
    session = open_session(folder / GRAPH_FILE, 1)
    after = _resident()
    assert before is not None
    assert after is not None
    assert after.anonymous - before.anonymous < WEIGHT / 2
    assert _mapped_bytes(folder / DATA_FILE) == pytest.approx(WEIGHT, rel=0.1)
    del session


def test_packed_weights_leave_the_limit_of_a_step_alone(folder: Path) -> None:
    """Private ones would count against it, and void it once they are more than it."""
    pack_weights(folder)
    memory = StepMemory(WEIGHT // 4)
    session = open_session(folder / GRAPH_FILE, 1, memory)
    for rows, fits in ((8, True), (4096, False), (8, True)):
        binding = session.io_binding()
        values = np.ones((rows, 1024), np.float32)
        binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(values))
        binding.bind_output("y")
        if fits:
            memory.run(session, binding)
        else:
            with pytest.raises(StepMemoryError):
                memory.run(session, binding)


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512_vnni smep fma", "-avx2-avx512_vnni-fma"),
        ("Features\t: fp asimd asimddp i8mm sve2", "-asimd-asimddp-i8mm-sve2"),
        ("model name : a processor", ""),
    ],
)
def test_the_key_names_what_decides_how_weights_are_packed(
    line: str, sets: str, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{line}\n{line}\n", "utf-8")
    key = packing_key(file)
    assert key.startswith(f"{ort.__version__}-")
    assert key.endswith(sets)


def test_the_key_does_without_the_kernel_s_description(tmp_path: Path) -> None:
    assert packing_key(tmp_path / "absent").startswith(f"{ort.__version__}-")
