"""Builds: complete or absent, shared, and repaired."""

import contextlib
import errno
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
from kv_room import room
from tiny_models import TinyModel
from tiny_tokenizer import BYTE_VOCABULARY, save_byte_tokenizer

from edge_engine import build as build_module
from edge_engine import external_data
from edge_engine.build import ensure_build, find_build
from edge_engine.manifest import DATA_FILE, MANIFEST_FILE, KvPrecision, Precision
from edge_engine.open_model import open_model
from edge_engine.run_inputs import Chunk
from edge_engine.runner import Runner
from engine_core.errors import ModelError
from engine_core.models import ModelFiles, ModelStore


@pytest.fixture
def files(tiny_model: Callable[..., TinyModel]) -> ModelFiles:
    files: ModelFiles = tiny_model(vocab_size=BYTE_VOCABULARY).files
    save_byte_tokenizer(files.path)
    return files


def nothing_is_left(store: ModelStore) -> bool:
    return not any((store.root / "builds").glob("*")) and not any((store.root / "tmp").glob("*"))


def test_a_build_is_found_again_and_answers(store: ModelStore, files: ModelFiles) -> None:
    assert find_build(store, files) is None
    build = ensure_build(store, files, progress=False)
    assert find_build(store, files) == build
    assert build.manifest.source_digest == files.digest
    assert build.manifest.files.keys() == {"model.onnx", DATA_FILE}
    model = open_model(build, threads=1)
    assert isinstance(model, Runner)
    assert model.context_window == 128
    assert np.isfinite(model.step([Chunk(0, 0, [1, 2], wants_logits=True)])).all()
    assert list((store.root / "tmp").iterdir()) == []


def test_a_second_call_does_not_build(
    store: ModelStore, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ensure_build(store, files, progress=False)
    monkeypatch.delattr(build_module, "_make")
    assert ensure_build(store, files) == first


def test_precisions_are_builds_of_their_own(store: ModelStore, files: ModelFiles) -> None:
    small = ensure_build(store, files, "int8", progress=False)
    exact = ensure_build(store, files, "fp32", progress=False)
    assert small.folder != exact.folder
    assert exact.manifest.precision == "fp32"


def test_a_runtime_without_query_seqlens_gets_its_own_build(
    store: ModelStore, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    ragged = ensure_build(store, files, progress=False)
    monkeypatch.setattr(build_module, "has_query_seqlens", lambda: False)
    split = ensure_build(store, files, progress=False)
    assert (ragged.manifest.ragged, split.manifest.ragged) == (True, False)
    assert split.folder != ragged.folder
    logits = [Runner(build, room(8), threads=1).all_logits([1, 2, 3]) for build in (split, ragged)]
    np.testing.assert_allclose(*logits, atol=1e-3)


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_int8_keys_and_values_are_a_build_of_their_own(
    precision: Precision, store: ModelStore, files: ModelFiles
) -> None:
    plain = ensure_build(store, files, precision, progress=False)
    assert find_build(store, files, precision, "int8") is None
    small = ensure_build(store, files, precision, "int8", progress=False)
    assert find_build(store, files, precision, "int8") == small
    assert find_build(store, files, precision) == plain
    assert (plain.manifest.kv, small.manifest.kv) == ("float32", "int8")
    ids = list(range(20))
    exact, rounded = (
        Runner(build, room(32), threads=1).all_logits(ids) for build in (plain, small)
    )
    assert 0 < np.abs(exact - rounded).max() < 0.5


def test_a_runtime_without_int8_keys_and_values_is_said(
    store: ModelStore, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "has_int8_kv", lambda: False)
    with pytest.raises(ModelError, match=r"no int8 keys and values; .* set kv to float32\."):
        ensure_build(store, files, kv="int8", progress=False)
    assert nothing_is_left(store)
    ensure_build(store, files, progress=False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / DATA_FILE, 100),
        lambda folder: (folder / "model.onnx").unlink(),
        lambda folder: (folder / MANIFEST_FILE).unlink(),
        lambda folder: (folder / MANIFEST_FILE).write_text("{", "utf-8"),
        lambda folder: (folder / "model.onnx.bak").touch(),
    ],
    ids=["cut data", "no graph", "no manifest", "cut manifest", "foreign file"],
)
def test_a_damaged_build_is_made_anew(
    damage: Callable[[Path], None], store: ModelStore, files: ModelFiles
) -> None:
    build = ensure_build(store, files, progress=False)
    damage(build.folder)
    assert find_build(store, files) is None
    assert ensure_build(store, files, progress=False) == build
    assert find_build(store, files) == build


def test_a_newer_emitter_takes_the_place_of_the_older_ones_builds(
    store: ModelStore, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ensure_build(store, files, progress=False)
    exact = ensure_build(store, files, "fp32", progress=False)
    monkeypatch.setattr(build_module, "EMITTER_VERSION", build_module.EMITTER_VERSION + 1)
    new = ensure_build(store, files, progress=False)
    assert not old.folder.exists()
    assert set(store.builds(files)) == {exact.folder, new.folder}
    monkeypatch.undo()
    ensure_build(store, files, progress=False)
    assert set(store.builds(files)) == {exact.folder, new.folder, old.folder}


def test_a_changed_model_takes_the_place_of_its_former_build(
    store: ModelStore, files: ModelFiles
) -> None:
    old = ensure_build(store, files, progress=False)
    torch_build = store.build_path(files, "torch-float32")
    torch_build.mkdir()
    new = ensure_build(store, replace(files, digest="another"), progress=False)
    assert new.folder != old.folder
    assert set(store.builds(files)) == {torch_build, new.folder}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv", ["float32", "int8"])
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_the_progress_bar_ends_full(
    *,
    precision: Precision,
    kv: KvPrecision,
    tied: bool,
    store: ModelStore,
    tiny_model: Callable[..., TinyModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = tiny_model(vocab_size=BYTE_VOCABULARY, tie_word_embeddings=tied).files
    save_byte_tokenizer(files.path)
    bars: list[Any] = []

    class RecordedBar(contextlib.AbstractContextManager["RecordedBar"]):
        def __init__(self, _what: str, total: int, *, shown: bool) -> None:
            self.total, self.n, self.shown = total, 0, shown
            bars.append(self)

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: int) -> None:
            self.n += count

    monkeypatch.setattr(build_module, "progress_bar", RecordedBar)
    ensure_build(store, files, precision, kv, progress=False)
    assert [bar.n for bar in bars] == [bar.total for bar in bars]


def test_what_a_killed_build_left_is_cleared_away(store: ModelStore, files: ModelFiles) -> None:
    name = store.build_path(files, build_module._variant("int8", "float32")).name
    left = store.root / "tmp" / f"build-{name}"
    left.mkdir(parents=True)
    (left / "half-written").touch()
    build = ensure_build(store, files, progress=False)
    assert not left.exists()
    assert not (build.folder / "half-written").exists()


def test_parallel_starts_share_one_build(
    store: ModelStore, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = build_module._make

    def counted(*arguments: object) -> object:
        made.append(1)
        return make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(build_module, "_make", counted)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_build(store, files, progress=False)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [found[0]] * 4


def test_a_full_disk_is_said_and_leaves_nothing(
    store: ModelStore, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(external_data.ExternalData, "add", full)
    with pytest.raises(ModelError, match="disk is full"):
        ensure_build(store, files, progress=False)
    assert nothing_is_left(store)


def test_too_little_room_is_said_before_the_work(
    store: ModelStore, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    monkeypatch.delattr(build_module, "emit_graph")
    with pytest.raises(ModelError, match="disk is full"):
        ensure_build(store, files, progress=False)
    assert nothing_is_left(store)


def test_a_checkpoint_without_a_needed_tensor_is_named(
    store: ModelStore, files: ModelFiles
) -> None:
    config = json.loads((files.path / "config.json").read_text("utf-8"))
    (files.path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}), "utf-8")
    with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.2\.input_layernorm\.weight'"):
        ensure_build(store, files, progress=False)
    assert nothing_is_left(store)


def test_a_graph_that_does_not_run_is_no_build(store: ModelStore, files: ModelFiles) -> None:
    config = json.loads((files.path / "config.json").read_text("utf-8"))
    (files.path / "config.json").write_text(
        json.dumps(config | {"num_key_value_heads": 1}), "utf-8"
    )
    with pytest.raises(ModelError, match="does not run on this onnxruntime"):
        ensure_build(store, files, progress=False)
    assert nothing_is_left(store)


def fill(tiny: TinyModel, layer: str, value: float) -> ModelFiles:
    import torch

    save_byte_tokenizer(tiny.files.path)
    with torch.no_grad():
        tiny.torch_model.get_submodule(layer).weight.fill_(value)
    tiny.torch_model.save_pretrained(tiny.files.path)
    return tiny.files


def test_a_tensor_that_is_not_finite_is_named(
    store: ModelStore, tiny_model: Callable[..., TinyModel]
) -> None:
    files = fill(tiny_model(vocab_size=BYTE_VOCABULARY), "model.norm", float("nan"))
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds numbers that are not finite"):
        ensure_build(store, files, progress=False)
    assert nothing_is_left(store)


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_a_model_that_overflows_is_no_build(
    precision: Precision, store: ModelStore, tiny_model: Callable[..., TinyModel]
) -> None:
    layer = "model.layers.0.post_attention_layernorm"
    files = fill(tiny_model(vocab_size=BYTE_VOCABULARY), layer, 3e38)
    with pytest.raises(ModelError, match="gives numbers that are not finite"):
        ensure_build(store, files, precision, progress=False)
    assert nothing_is_left(store)


def test_another_architecture_without_the_exporter_says_what_to_install(
    store: ModelStore, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((files.path / "config.json").read_text("utf-8"))
    (files.path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}), "utf-8")

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ModelError, match=r"model_type gpt2.*pip install 'tidegate\[export\]'"):
        ensure_build(store, files, progress=False)
    assert nothing_is_left(store)


def test_an_exported_graph_has_no_int8_keys_and_values(
    store: ModelStore, files: ModelFiles
) -> None:
    config = json.loads((files.path / "config.json").read_text("utf-8"))
    (files.path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}), "utf-8")
    with pytest.raises(ModelError, match=r"model_type gpt2.* set kv to float32\."):
        ensure_build(store, files, kv="int8", progress=False)
    assert nothing_is_left(store)


def test_a_gguf_that_the_emitter_cannot_express_is_not_sent_to_the_exporter(
    store: ModelStore, write_gguf: Callable[..., Path]
) -> None:
    scaling = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    path = write_gguf(scaling)
    with pytest.raises(ModelError, match=r"yarn.*reads no GGUF.*safetensors"):
        ensure_build(store, store.find(str(path)), progress=False)
    assert nothing_is_left(store)


def test_more_context_than_the_model_has_is_refused(store: ModelStore, files: ModelFiles) -> None:
    build = ensure_build(store, files, progress=False)
    assert open_model(build, context=100).context_window == 100
    with pytest.raises(ModelError, match="at most 128"):
        open_model(build, context=129)


def test_memory_too_small_for_one_token_is_told_with_one_that_is_enough(
    store: ModelStore, files: ModelFiles
) -> None:
    build = ensure_build(store, files, progress=False)
    with pytest.raises(
        ModelError, match=r"^step_memory of 1 KiB is too little.*raise it to 16 KiB"
    ):
        open_model(build, step_memory=2**10)


def test_only_a_model_that_serves_logs_how_its_memory_is_cut_up(
    store: ModelStore, files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        build = ensure_build(store, files, progress=False)
        assert caplog.messages == []
        open_model(build, context=100, slots=2)
    (line,) = caplog.messages
    assert "(100 + 1) tokens x 2 slots" in line


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_build_says_that_nothing_of_it_is_kept(
    store: ModelStore,
    files: ModelFiles,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interruption: type[BaseException],
) -> None:
    def fake_make(*_: object) -> Never:
        raise interruption

    monkeypatch.setattr("edge_engine.build._make", fake_make)
    with pytest.raises(interruption):
        ensure_build(store, files)
    assert "Interrupted: nothing of the build is kept" in capsys.readouterr().err
    assert nothing_is_left(store)


def test_a_build_of_a_known_architecture_imports_no_torch(
    store: ModelStore, files: ModelFiles
) -> None:
    code = (
        "import sys, pathlib\n"
        "from edge_engine.build import ensure_build\n"
        "from engine_core.models import ModelFiles, ModelStore\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "files = ModelFiles(sys.argv[1], 'm', path, 'safetensors', 'digest')\n"
        "ensure_build(ModelStore(pathlib.Path(sys.argv[2])), files)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(files.path), str(store.root)],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    assert "building m (int8)" in done.stderr
