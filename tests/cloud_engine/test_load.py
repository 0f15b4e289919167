"""Loading from the store: exact weights, one conversion, plain errors."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY, TinyModel, save_tiny_model

from engine_core.errors import ModelError
from engine_core.models import ModelFiles, ModelStore


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    """Return a tiny random Llama on disk."""
    return save_tiny_model(tmp_path / "tiny", "llama", **TINY)


def load(files: ModelFiles, root: Path, dtype: str = "float32") -> Any:
    import torch

    from cloud_engine.load import load_causal_lm

    return load_causal_lm(
        files, ModelStore(root), device=torch.device("cpu"), dtype=getattr(torch, dtype)
    )


def gguf_files(path: Path) -> ModelFiles:
    return ModelFiles(str(path), path.stem, path, "gguf", "fedcba")


def write_llama(write_gguf: Callable[..., Path], *, without: str | None = None) -> ModelFiles:
    """Write a tiny Llama of random weights as GGUF, perhaps without one of its tensors."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (32, 64), "output_norm.weight": (64,), "output.weight": (32, 64)}
    for layer in range(2):
        parts = {
            "attn_q": (64, 64),
            "attn_k": (32, 64),
            "attn_v": (32, 64),
            "attn_output": (64, 64),
            "ffn_gate": (128, 64),
            "ffn_up": (128, 64),
            "ffn_down": (64, 128),
            "attn_norm": (64,),
            "ffn_norm": (64,),
        }
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    tensors = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
        if name != without
    }
    tokens = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(32)], "llama.vocab_size": 32}
    return gguf_files(write_gguf(tokens, tensors=tensors))


def test_safetensors_are_loaded_exactly(tiny: TinyModel, tmp_path: Path) -> None:
    import torch

    model = load(tiny.files, tmp_path)
    assert not model.training
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), tiny.torch_model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_number_type_is_the_one_asked_for(tiny: TinyModel, tmp_path: Path) -> None:
    assert str(load(tiny.files, tmp_path, "bfloat16").dtype) == "torch.bfloat16"


def test_gguf_is_converted_once_and_then_read_from_the_build(
    write_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    import cloud_engine.load

    files = write_llama(write_gguf)
    root = tmp_path / "store"
    first = load(files, root)
    assert [entry.kind for entry in ModelStore(root).entries()] == ["build"]
    assert list((root / "tmp").iterdir()) == []
    monkeypatch.setattr(cloud_engine.load, "_convert", None)
    second = load(files, root)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)


def test_full_disk_leaves_no_half_build(
    write_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cloud_engine.load

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    files = write_llama(write_gguf)
    monkeypatch.setattr(cloud_engine.load, "replace_durably", full)
    with pytest.raises(ModelError, match="disk is full"):
        load(files, tmp_path / "store")
    assert ModelStore(tmp_path / "store").entries() == []
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_weight_that_is_missing_is_an_error_and_not_a_random_number(
    tiny: TinyModel, tmp_path: Path
) -> None:
    config = tiny.files.path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lacks \d+ of its weights, model\.layers\.2"):
        load(tiny.files, tmp_path)


def test_weight_that_a_gguf_lacks_is_not_made_up_either(
    write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    files = write_llama(write_gguf, without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"lacks 1 of its weights, model\.layers\.1\.mlp\.up_proj"):
        load(files, tmp_path / "store")
    assert ModelStore(tmp_path / "store").entries() == []


def test_damaged_and_foreign_files_are_errors_of_one_line(tiny: TinyModel, tmp_path: Path) -> None:
    weights = tiny.files.path / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[: len(good) // 2])
    with pytest.raises(ModelError, match="transformers cannot load") as error:
        load(tiny.files, tmp_path)
    assert "\n" not in str(error.value)
    weights.write_bytes(good)
    config = tiny.files.path / "config.json"
    config.write_text(json.dumps({"model_type": "nothing_we_know"}))
    with pytest.raises(ModelError, match="transformers cannot load"):
        load(tiny.files, tmp_path)


def test_pickled_weights_are_not_read(tiny: TinyModel, tmp_path: Path) -> None:
    import torch

    folder = tmp_path / "pickled"
    shutil.copytree(tiny.files.path, folder)
    (folder / "model.safetensors").unlink()
    torch.save(tiny.torch_model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load(replace(tiny.files, path=folder), tmp_path)


def test_device_and_number_type_are_picked_by_what_is_there() -> None:
    import torch

    from cloud_engine.device import pick_device, pick_dtype

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert pick_device("cpu") == cpu
    assert pick_device("auto") == (gpu if torch.cuda.is_available() else cpu)
    assert pick_dtype("auto", cpu) == torch.float32
    assert pick_dtype("auto", gpu) == torch.bfloat16
    assert pick_dtype("float16", cpu) == torch.float16
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="nvidia-smi"):
            pick_device("cuda")


def test_threads_sleep_while_they_wait() -> None:
    """Without this two engines on the same cores starve each other."""
    import os
    import subprocess
    import sys

    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    code = "import cloud_engine, os; print(os.environ['OMP_WAIT_POLICY'])"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "PASSIVE\n"
