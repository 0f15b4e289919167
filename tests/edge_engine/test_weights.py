"""Tensors from files, and files that cannot be used."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_models import TinyModel

from edge_engine.weights import GgufWeights, SafetensorsWeights, open_weights
from engine_core.errors import ModelError


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_every_float_type_reads_as_float32(
    dtype: str, tiny_model: Callable[..., TinyModel]
) -> None:
    tiny = tiny_model(dtype=dtype)
    weights = open_weights(tiny.files)
    for name, parameter in tiny.torch_model.state_dict().items():
        read = weights.read(name)
        assert read.dtype == np.float32
        assert weights.elements[name] == read.size
        np.testing.assert_array_equal(read, parameter.numpy())


def test_a_model_in_several_files_is_one_model(tiny_model: Callable[..., TinyModel]) -> None:
    tiny = tiny_model()
    whole = open_weights(tiny.files).elements
    folder = tiny.files.path
    (folder / "model.safetensors").unlink()
    tiny.torch_model.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    weights = open_weights(tiny.files)
    assert weights.elements == whole
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(weights.read(name), tiny.torch_model.state_dict()[name].numpy())


def test_a_quantised_checkpoint_is_refused_with_what_to_use_instead(
    tiny_model: Callable[..., TinyModel],
) -> None:
    folder = tiny_model().files.path
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelError, match=r"already quantised.*original float checkpoint"):
        SafetensorsWeights(folder)


def safetensors(path: Path, dtype: str, shape: list[int], data: bytes) -> SafetensorsWeights:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"w": entry}).encode()
    path.joinpath("config.json").write_text("{}", "utf-8")
    path.joinpath("model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + data
    )
    return SafetensorsWeights(path)


def test_an_integer_tensor_is_refused_by_name(tmp_path: Path) -> None:
    weights = safetensors(tmp_path, "I8", [4], b"abcd")
    with pytest.raises(ModelError, match="w is stored as I8"):
        weights.read("w")


def test_a_tensor_that_is_shorter_than_its_shape_is_damage(tmp_path: Path) -> None:
    weights = safetensors(tmp_path, "F32", [3], b"12345678")
    with pytest.raises(ModelError, match="damaged at w"):
        weights.read("w")


def test_a_gguf_quantisation_that_cannot_be_undone_is_named(
    write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    def refuse(*_: object) -> None:
        raise NotImplementedError

    weights = GgufWeights(write_gguf())
    monkeypatch.setattr(gguf, "dequantize", refuse)
    with pytest.raises(ModelError, match=r"token_embd\.weight is stored as F32"):
        weights.read("model.embed_tokens.weight")
