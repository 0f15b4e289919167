"""ONNX Runtime as this engine uses it."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import psutil
import pytest
from kv_room import room
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from tiny_models import TinyModel

from edge_engine import session
from edge_engine.manifest import Build
from edge_engine.run_inputs import Chunk
from edge_engine.runner import Runner
from edge_engine.session import default_threads, has_int8_kv, has_query_seqlens, session_options

RUN_ONE_STEP = """
import pathlib, sys
from edge_engine.manifest import Build, Manifest
from edge_engine.open_model import open_model
from edge_engine.run_inputs import Chunk
manifest = Manifest(
    emitter=0, source="m", source_digest="", graph="gqa", precision="fp32", kv="float32",
    ragged=True, max_position=128, files={},
)
model = open_model(Build(pathlib.Path(sys.argv[1]), manifest), context=16)
model.step([Chunk(0, 0, [1, 2, 3], wants_logits=True)])
model.close()
assert not {"torch", "onnx"} & set(sys.modules)
"""


@pytest.fixture
def quota(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Return what sets the processors that the control groups leave; None is no limit."""

    def leave(processors: int | None) -> None:
        monkeypatch.setattr("edge_engine.session.cpu_limit", lambda: processors)

    leave(None)
    return leave


@pytest.mark.usefixtures("quota")
def test_threads_are_the_physical_cores_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda *, logical: 8 // (1 + (not logical)))
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: [0, 1, 2])
    assert default_threads() == 3
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: list(range(8)))
    assert default_threads() == 4
    monkeypatch.setattr(psutil, "cpu_count", lambda *, logical: None)  # noqa: ARG005 - its signature
    assert default_threads() == 8


def test_threads_are_no_more_than_the_processor_time_of_a_container(
    monkeypatch: pytest.MonkeyPatch, quota: Callable[[int | None], None]
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda *, logical: 8 // (1 + (not logical)))
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda _: list(range(8)))
    quota(2)
    assert default_threads() == 2


@pytest.mark.usefixtures("quota")
def test_threads_are_the_physical_cores_where_processes_are_not_bound_to_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(psutil.Process, "cpu_affinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(psutil, "cpu_count", lambda *, logical: 8 // (1 + (not logical)))
    assert default_threads() == 4


def test_idle_workers_spin_for_a_moment_only(
    tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    options = session_options(3)
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == "10"
    runner = Runner(emit(tiny_model().files), room(16), threads=3)
    runner.step([Chunk(0, 0, [1, 2, 3])])
    before = time.process_time()
    time.sleep(0.3)
    # Left to itself, the runtime would spin for some 30 ms on each of two workers.
    assert time.process_time() - before < 0.03


@pytest.mark.parametrize(("has", "since"), [(has_query_seqlens, 32), (has_int8_kv, 25)])
def test_the_runtime_is_asked_for_what_it_can_do(
    has: Any, since: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(has.cache_clear)
    has.cache_clear()
    version = tuple(map(int, ort.__version__.split(".")[:2]))
    assert has() == (version >= (1, since))

    others = [s for s in get_all_operator_schema() if s.name != "GroupQueryAttention"]
    monkeypatch.setattr(session, "get_all_operator_schema", lambda: others)
    has.cache_clear()
    assert not has()


def test_a_session_leaves_no_telemetry_behind_and_needs_no_torch(
    tiny_model: Callable[..., TinyModel], emit: Callable[..., Build], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("XDG_", "ORT_", "COVERAGE_"))
    }
    environment |= {"HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    folder = emit(tiny_model().files).folder
    subprocess.run(
        [sys.executable, "-c", RUN_ONE_STEP, str(folder)],
        env=environment,
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=60,
    )
    assert list(home.rglob("*")) == []
