"""What the edge engine's tests share."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kv_room import room
from tiny_models import TINY, TinyModel, save_tiny_model

from edge_engine.arch import llama_shape
from edge_engine.calibrate import activations, watched_values
from edge_engine.emit import emit_graph
from edge_engine.int8_linear import Int8Linear
from edge_engine.kv_scales import kv_scales
from edge_engine.linear import Linear, float_linear
from edge_engine.manifest import Build, KvPrecision, Manifest, Precision, file_sizes
from edge_engine.rotate import RotatedWeights
from edge_engine.runner import Runner
from edge_engine.weights import open_weights
from engine_core.models import ModelFiles, ModelStore


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., TinyModel]:
    """Return what saves a random Llama-shaped model: `tiny_model(family, **overrides)`."""

    def make(family: str = "llama", **overrides: Any) -> TinyModel:
        return save_tiny_model(tmp_path / family, family, **{**TINY, **overrides})

    return make


@pytest.fixture(scope="session")
def emit_in() -> Callable[[Path], Callable[..., Build]]:
    """Return what makes an `emit` whose builds lie in a folder."""

    def inside(parent: Path) -> Callable[..., Build]:
        def make(
            files: ModelFiles,
            precision: Precision = "fp32",
            *,
            ragged: bool = True,
            saturates: bool = False,
            kv: KvPrecision = "float32",
            text: Sequence[int] = range(64),
            **options: Any,
        ) -> Build:
            folder = Path(tempfile.mkdtemp(dir=parent))
            weights = open_weights(files)
            shape = llama_shape(weights.config)
            linear: Linear = float_linear
            if precision == "int8":
                weights = RotatedWeights(weights, shape)
                shape = weights.shape
            write = partial(
                emit_graph, weights, shape, folder, ragged=ragged, on_read=lambda _: None, **options
            )
            if precision == "int8":
                write(linear=Int8Linear(saturates=False), extra_outputs=watched_values(shape))
                rows = activations(folder, shape, [range(60), range(97)[::-2]], ragged=ragged)
                linear = Int8Linear(rows, saturates=saturates)
            write(linear=linear)
            if kv == "int8":
                scales = kv_scales(folder, shape, [text], ragged=ragged)
                write(linear=linear, kv_scales=scales)
            manifest = Manifest(
                emitter=0,
                source=files.name,
                source_digest=files.digest,
                graph="gqa",
                precision=precision,
                kv=kv,
                ragged=ragged,
                max_position=shape.max_position,
                files=file_sizes(folder),
            )
            return Build(folder, manifest)

        return make

    return inside


@pytest.fixture
def emit(emit_in: Callable[[Path], Callable[..., Build]], tmp_path: Path) -> Callable[..., Build]:
    """Return what emits a model's graph: `emit(files, precision, **options_of_emit_graph)`."""
    return emit_in(tmp_path)


@pytest.fixture
def emitted(emit: Callable[..., Build]) -> Callable[..., Runner]:
    """Return what emits and opens a graph with one thread and slots of 64 tokens."""

    def make(
        files: ModelFiles, precision: Precision = "fp32", *, slots: int = 1, **options: Any
    ) -> Runner:
        build = emit(files, precision, **options)
        return Runner(build, room(64, slots), threads=1)

    return make


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "cache")
