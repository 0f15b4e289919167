"""Make the graph of a model, once: complete in the store's folder or not there at all."""

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_engine.arch import LlamaShape, UnknownArchitectureError, llama_shape
from edge_engine.calibrate import activations, calibration_ids, watched_values
from edge_engine.emit import emit_graph
from edge_engine.int8_linear import Int8Linear, products_saturate
from edge_engine.kv_budget import KvBudget
from edge_engine.kv_scales import kv_scales
from edge_engine.linear import Linear, float_linear
from edge_engine.manifest import (
    Build,
    GraphKind,
    KvPrecision,
    Manifest,
    Precision,
    file_sizes,
    read_manifest,
    write_manifest,
)
from edge_engine.open_model import load_model
from edge_engine.packing import pack_weights, packing_key
from edge_engine.rotate import RotatedWeights
from edge_engine.session import has_int8_kv, has_query_seqlens
from edge_engine.step_memory import default_limit
from edge_engine.weights import Weights, is_tied, open_weights
from engine_core.downloads import check_room, plain_disk_errors, progress_bar, replace_durably, say
from engine_core.errors import ModelError
from engine_core.machine_limits import memory_limit
from engine_core.models import ModelFiles, ModelStore
from engine_core.scheduler import Scheduler, Sequence

EMITTER_VERSION = 4
"""Part of the build key: raise it whenever the graphs of an older version should be made anew."""

# Where other families than Llama's keep their limit of tokens in config.json.
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_FALLBACK_POSITIONS = 2048


def find_build(
    store: ModelStore,
    files: ModelFiles,
    precision: Precision = "int8",
    kv: KvPrecision = "float32",
) -> Build | None:
    """Return the build of a model for the installed runtime, or None."""
    folder = store.build_path(files, _variant(precision, kv))
    manifest = read_manifest(folder)
    return None if manifest is None else Build(folder, manifest)


def ensure_build(
    store: ModelStore,
    files: ModelFiles,
    precision: Precision = "int8",
    kv: KvPrecision = "float32",
    *,
    progress: bool = True,
) -> Build:
    """Return the build of a model; make it first if it is absent or damaged.

    Safe to call from several processes at once: one builds, the others wait for it. A new build
    takes the place of those by older emitters and of those from files that have changed since.

    Args:
        store: Where builds live.
        files: A model that is on this machine.
        precision: `int8` to serve, `fp32` to compare with.
        kv: What keys and values are kept in.
        progress: Draw a progress bar on stderr.

    Raises:
        ModelError: the model cannot be read, exported or run, or not with such keys and values, or
            the disk is full; nothing is left behind.
    """
    folder = store.build_path(files, _variant(precision, kv))
    with store.lock(f"build {folder.name}"):
        found = find_build(store, files, precision, kv)
        if found is not None:
            return found
        # A fixed name, so that what a killed build left is cleared away by the next one.
        partial = store.root / "tmp" / f"build-{folder.name}"
        try:
            with plain_disk_errors(folder):
                for left_over in (partial, folder):
                    if left_over.exists():
                        shutil.rmtree(left_over)
                partial.mkdir(parents=True)
                manifest = _make(files, partial, precision, kv, progress)
                replace_durably(partial, folder)
        except (KeyboardInterrupt, SystemExit):
            say(
                f"Interrupted: nothing of the build is kept; the next start builds {files.name} again"
            )
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _remove_superseded(store, files, manifest)
    return Build(folder, manifest)


def _variant(precision: Precision, kv: KvPrecision) -> str:
    """Name everything but the model that shapes a build."""
    step_mode = "ragged" if has_query_seqlens() else "split"
    if kv != "float32":
        step_mode += f"-kv-{kv}"
    if precision == "fp32":
        return f"edge-v{EMITTER_VERSION}-fp32-{step_mode}"
    return f"edge-v{EMITTER_VERSION}-int8-{step_mode}-{packing_key()}"


def _make(
    files: ModelFiles, folder: Path, precision: Precision, kv: KvPrecision, progress: bool
) -> Manifest:
    if kv == "int8" and not has_int8_kv():
        raise ModelError(
            f"onnxruntime {ort.__version__} has no int8 keys and values; install a newer one, or set "
            "kv to float32."
        )
    weights = open_weights(files)
    try:
        shape = llama_shape(weights.config)
    except UnknownArchitectureError as reason:
        if kv != "float32":
            raise ModelError(
                f"{files.name} needs the exporter ({reason}), whose graphs keep keys and values in "
                "float32; set kv to float32."
            ) from None
        _export(files, folder, precision, reason)
        graph: GraphKind = "past_kv"
        max_position = _max_position(weights)
    else:
        _emit(files, weights, shape, folder, precision=precision, kv=kv, progress=progress)
        graph = "gqa"
        max_position = shape.max_position
    if precision == "int8":
        with _must_run(files):
            pack_weights(folder)
    manifest = Manifest(
        emitter=EMITTER_VERSION,
        source=files.name,
        source_digest=files.digest,
        graph=graph,
        precision=precision,
        kv=kv,
        ragged=graph == "gqa" and has_query_seqlens(),
        max_position=max_position,
        files=file_sizes(folder),
    )
    _try_out(files, folder, manifest)
    write_manifest(folder, manifest)
    return manifest


def _emit(
    files: ModelFiles,
    weights: Weights,
    shape: LlamaShape,
    folder: Path,
    *,
    precision: Precision,
    kv: KvPrecision,
    progress: bool,
) -> None:
    ragged = has_query_seqlens()
    if precision == "int8":
        rotated = RotatedWeights(weights, shape)
        weights, shape = rotated, rotated.shape
    total = sum(weights.elements.values())
    embedding = weights.elements.get("model.embed_tokens.weight", 0)
    if is_tied(weights, shape):
        total += embedding  # read as the table and again as the head
    if precision == "int8":
        # The graph as emitted, a copy of it, and in that the packed weights once more.
        check_room(folder, 3 * total + 2 * 4 * embedding)
    else:
        check_room(folder, 4 * total)
    rounds = 2 if "int8" in (precision, kv) else 1
    what = f"building {files.label} ({precision})"
    with progress_bar(what, rounds * 4 * total, shown=progress) as bar:
        emit = functools.partial(
            emit_graph, weights, shape, folder, ragged=ragged, on_read=bar.update
        )
        linear: Linear = float_linear
        scales = None
        try:
            if "int8" in (precision, kv):
                # Once to see what flows through it, and again with numbers that fit that.
                watched: list[str] = []
                if precision == "int8":
                    saturates = products_saturate()
                    linear, watched = Int8Linear(saturates=saturates), watched_values(shape)
                emit(linear=linear, extra_outputs=watched)
                texts = calibration_ids(files, shape.max_position)
                with _must_run(files):
                    if precision == "int8":
                        rows = activations(folder, shape, texts, ragged=ragged)
                        _must_be_finite(files, rows.values())
                        linear = Int8Linear(rows, saturates=saturates)
                    if kv == "int8":
                        scales = kv_scales(folder, shape, texts, ragged=ragged)
                        _must_be_finite(files, scales.values())
            emit(linear=linear, kv_scales=scales)
        except KeyError as error:
            raise ModelError(
                f"{files.name} has no tensor {error} although it says it is a {shape.family} "
                "model; download it again, or name its original checkpoint."
            ) from None


def _export(files: ModelFiles, folder: Path, precision: Precision, reason: Exception) -> None:
    """Let optimum write the graph, in a process that takes torch away with it when it ends."""
    if files.format == "gguf":
        raise ModelError(
            f"{files.name} needs the exporter ({reason}), which reads no GGUF; take the model's "
            "safetensors folder or its Hugging Face name instead."
        )
    try:
        importlib.metadata.version("optimum-onnx")
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"{files.name} needs the exporter ({reason}); install it with "
            "pip install 'tidegate[export]', or '.[export]' in a clone, and try again."
        ) from None
    say(f"{files.name} goes through optimum, which is slower ({reason})")
    # Tracing warns about every Python value it meets; only errors are worth a reader's time.
    command = [sys.executable, "-W", "ignore", "-m", "edge_engine.optimum_export"]
    command += [str(files.path), str(folder), "--precision", precision]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    # The pipe is the child's lifeline: it ends itself when this process is gone.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment
    ) as child:
        try:
            status = child.wait()
        except BaseException:
            child.kill()
            raise
    if status:
        raise ModelError(
            f"optimum could not export {files.name} (its messages are above); serve this model "
            "with the cloud engine instead."
        )


def _max_position(weights: Weights) -> int:
    found = (weights.config.get(key) for key in _POSITION_KEYS)
    return next((int(limit) for limit in found if limit), _FALLBACK_POSITIONS)


def _try_out(files: ModelFiles, folder: Path, manifest: Manifest) -> None:
    """Run two steps, so that a graph that cannot answer is found now and not by a client."""
    with _must_run(files):
        memory = memory_limit()
        budget = KvBudget(None, memory, context=4, slots=1)
        model, _ = load_model(Build(folder, manifest), budget, step_limit=default_limit(memory))
        scheduler = Scheduler(model.space, max_waiting=0, chunk=2, budget=2)
        scheduler.add(Sequence(tokens=[0, 1, 2]))
        logits = []
        for _ in range(2):
            rows = scheduler.plan()
            logits.append(np.array(model.step(rows)))
            scheduler.computed(rows)
        model.close()
    _must_be_finite(files, logits)


@contextmanager
def _must_run(files: ModelFiles) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"the graph built from {files.name} does not run on this onnxruntime: {error}"
        ) from error


def _must_be_finite(files: ModelFiles, arrays: Iterable[NDArray[np.float32]]) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise ModelError(
            f"the graph built from {files.name} gives numbers that are not finite; the "
            "checkpoint is damaged, or overflows float32."
        )


def _remove_superseded(store: ModelStore, files: ModelFiles, new: Manifest) -> None:
    """Remove a model's builds in the same precision that nobody will ask for again.

    One that another process has open stays readable to it.
    """
    for folder in store.builds(files):
        old = read_manifest(folder)
        if (
            old is not None
            and old.precision == new.precision
            and (old.emitter < new.emitter or old.source_digest != new.source_digest)
        ):
            shutil.rmtree(folder, ignore_errors=True)
