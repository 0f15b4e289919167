"""The arena's limit: an oversized run fails alone, and what nobody uses goes back."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest
from onnx import TensorProto, helper

from edge_engine import step_memory
from edge_engine.session import open_session
from edge_engine.step_memory import DEFAULT_LEAST, StepMemory, default_limit
from engine_core.errors import StepMemoryError

MIB = 2**20


@pytest.fixture
def doubler(tmp_path: Path) -> Path:
    """Return a graph that needs twice the bytes of its input while it runs."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Sin", ["a"], ["b"]),
        helper.make_node("ReduceSum", ["b"], ["y"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes, "doubler", [info("x", TensorProto.FLOAT, ["n"])], [info("y", TensorProto.FLOAT, [])]
    )
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


class Steps:
    """Runs of the graph over inputs of chosen sizes."""

    def __init__(self, graph: Path, limit: int) -> None:
        self.memory = StepMemory(limit)
        self.session = open_session(graph, 1, self.memory)
        self._input = np.zeros(64 * MIB // 4, np.float32)

    def run(self, mib: int) -> float:
        binding = self.session.io_binding()
        values = self._input[: mib * MIB // 4]
        binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(values))
        binding.bind_output("y")
        self.memory.run(self.session, binding)
        return float(binding.get_outputs()[0].numpy())


def test_a_run_beyond_the_limit_fails_alone(
    doubler: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(doubler, 32 * MIB)
    expected = steps.run(4)
    for _ in range(3):
        with pytest.raises(StepMemoryError, match="smaller than requested bytes"):
            steps.run(48)
        assert steps.run(4) == expected
    assert capfd.readouterr().err == ""


def test_regions_that_other_runs_left_do_not_stand_in_the_way(doubler: Path) -> None:
    steps = Steps(doubler, 64 * MIB)
    for mib in (4, 16, 30, 8, 24):
        steps.run(mib)


def test_what_no_run_uses_goes_back_to_the_system(doubler: Path) -> None:
    steps = Steps(doubler, 256 * MIB)
    steps.run(1)
    steps.memory.shrink()
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(3):
        steps.run(48)
        assert process.memory_info().rss > before + 40 * MIB
        steps.memory.shrink()
        assert process.memory_info().rss < before + 4 * MIB


def test_shrinking_does_without_glibc(doubler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(doubler, 32 * MIB)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    steps.memory.shrink()


def test_each_memory_has_its_own_limit(doubler: Path) -> None:
    small = Steps(doubler, 16 * MIB)
    large = Steps(doubler, 128 * MIB)
    large.run(48)
    with pytest.raises(StepMemoryError):
        small.run(48)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (RuntimeError("a kernel broke"), RuntimeError),
        (RuntimeError("Failed to allocate memory for requested buffer"), StepMemoryError),
        (MemoryError("std::bad_alloc"), StepMemoryError),
    ],
)
def test_only_a_lack_of_memory_is_called_one(
    doubler: Path, raised: Exception, seen: type[Exception]
) -> None:
    class FakeSession:
        def run_with_iobinding(self, *_: object) -> None:
            raise raised

    steps = Steps(doubler, 32 * MIB)
    session: Any = FakeSession()
    with pytest.raises(seen, match=str(raised)):
        steps.memory.run(session, steps.session.io_binding())


def test_the_limit_is_a_share_of_the_memory_but_enough_for_a_step() -> None:
    assert default_limit(100 * 2**30) == 5 * 2**30
    assert default_limit(2**28) == DEFAULT_LEAST


def test_the_smallest_graph_is_what_it_says() -> None:
    model = onnx.load_model_from_string(step_memory._IDENTITY)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["Identity"]
