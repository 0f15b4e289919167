"""Architectures that the emitter does not know, and optimum as its oracle."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_process import engine_process
from kv_room import room
from tiny_models import TINY, TinyModel, save_tiny_model
from tiny_tokenizer import BYTE_VOCABULARY, save_byte_tokenizer

from edge_engine.build import ensure_build
from edge_engine.kv_budget import KvBudget
from edge_engine.manifest import Build, Manifest
from edge_engine.open_model import open_model
from edge_engine.past_kv_model import PastKvModel
from edge_engine.runner import Runner
from engine_core.errors import ModelError, StepMemoryError
from engine_core.models import ModelStore

IDS = np.random.default_rng(2).integers(0, 97, 30).tolist()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return a GPT-2: learned positions, Conv1D layers, GELU, a tied head."""
    folder = tmp_path_factory.mktemp("models") / "tiny-gpt2"
    tiny = save_tiny_model(
        folder,
        "gpt2",
        vocab_size=BYTE_VOCABULARY,
        n_positions=128,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=256,
        eos_token_id=256,
    )
    save_byte_tokenizer(folder)
    return tiny


@pytest.fixture(scope="module")
def gpt2_store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return ModelStore(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def exact(gpt2: TinyModel, gpt2_store: ModelStore) -> Build:
    return ensure_build(gpt2_store, gpt2.files, "fp32", progress=False)


@pytest.mark.slow
def test_an_exported_graph_gives_torch_s_logits_in_chunks_of_any_size(
    gpt2: TinyModel, exact: Build
) -> None:
    assert exact.manifest.graph == "past_kv"
    assert exact.manifest.max_position == 128
    model = PastKvModel(exact, room(30), threads=1)
    wanted = gpt2.logits(IDS)
    for size in (1, 7, 30):
        model.reset()
        for begin in range(0, 30, size):
            last = model.forward(IDS[begin : begin + size])
            row = min(begin + size, 30) - 1
            np.testing.assert_allclose(last, wanted[row], atol=1e-4)


@pytest.mark.slow
def test_memory_and_room_of_an_exported_graph_are_counted(exact: Build) -> None:
    model = PastKvModel(exact, room(16, slots=8), threads=1)
    assert model.kv_token_bytes == 2 * 2 * 64 * 4
    model.forward([1] * 8)
    with pytest.raises(ValueError, match="8 of 16 are used"):
        model.forward([1] * 9)
    model.reset()
    model.forward([1] * 16)
    model.close()
    assert not hasattr(model, "_session")


@pytest.mark.slow
def test_a_step_of_an_exported_graph_has_a_limit_too(
    gpt2: TinyModel, gpt2_store: ModelStore
) -> None:
    build = ensure_build(gpt2_store, gpt2.files, progress=False)
    budget = KvBudget(memory=2**17, limit=2**30, context=120)
    model = PastKvModel(build, budget, threads=1, step_limit=2**12)
    with pytest.raises(StepMemoryError):
        model.forward([1] * 120)
    model.forward([1] * 4)
    model.close()


@pytest.mark.slow
def test_an_input_that_no_text_decoder_has_is_refused(
    exact: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_engine.past_kv_model._KNOWN_INPUTS", frozenset({"input_ids"}))
    with pytest.raises(ModelError, match=r"wants the input 'attention_mask'.*cloud engine"):
        open_model(exact)


@pytest.mark.slow
def test_a_gpt2_goes_through_optimum_into_int8_and_answers(
    gpt2: TinyModel, gpt2_store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", str(gpt2_store.root))
    with engine_process("edge_engine", "--model", str(gpt2.files.path)) as engine:
        engine.wait_until_ready()
        answer = engine.http.post(
            "/v1/chat/completions",
            json={
                "model": "m",
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 12,
                "temperature": 0,
            },
        ).json()
        stats = engine.stats()
    details = stats["details"]
    assert sum(stats["memory"].values()) == pytest.approx(stats["rss_bytes"], rel=0.05)
    assert details["graph"] == "past_kv"
    assert details["precision"] == "int8"
    assert answer["model"] == "tiny-gpt2"
    assert answer["usage"]["prompt_tokens"] == len("Hi\n")
    assert answer["usage"]["completion_tokens"] > 0


@pytest.mark.slow
def test_an_export_that_fails_points_at_its_messages(
    gpt2: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = gpt2.files.path / "config.json"
    kept = config.read_text("utf-8")
    config.write_text(
        kept.replace('"model_type": "gpt2"', '"model_type": "no_such_model"'), "utf-8"
    )
    store = ModelStore(tmp_path)
    try:
        with pytest.raises(ModelError, match=r"optimum could not export .* cloud engine"):
            ensure_build(store, gpt2.files, progress=False)
    finally:
        config.write_text(kept, "utf-8")
    assert "no_such_model" in capfd.readouterr().err
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.slow
def test_the_emitted_graph_agrees_with_optimum_s_export(
    tmp_path: Path, emit: Callable[..., Build]
) -> None:
    tiny = save_tiny_model(tmp_path / "llama", "llama", **TINY)
    target = tmp_path / "export"
    target.mkdir()
    command = [sys.executable, "-m", "edge_engine.optimum_export"]
    command += [str(tiny.files.path), str(target), "--precision", "fp32"]
    # The pipe stays open while it works: it is the exporter's lifeline.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as exporter:
        assert exporter.wait(120) == 0
    manifest = Manifest(
        emitter=0,
        source="tiny",
        source_digest="",
        graph="past_kv",
        precision="fp32",
        kv="float32",
        ragged=False,
        max_position=128,
        files={},
    )
    exported = PastKvModel(Build(target, manifest), room(64), threads=1)
    emitted = Runner(emit(tiny.files), room(64), threads=1).all_logits(IDS)
    for token, logits in zip(IDS, emitted, strict=True):
        np.testing.assert_allclose(logits, exported.forward([token]), atol=1e-4)
