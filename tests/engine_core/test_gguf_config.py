"""GGUF metadata in the words of `config.json`."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine_core.errors import ModelError
from engine_core.gguf_config import config_of
from engine_core.gguf_file import read_gguf
from engine_core.models import ModelFiles


def llama3_divisors(theta: float, factor: float, dimensions: int) -> np.ndarray:
    """Return how much slower each frequency turns, by transformers' formula."""
    frequencies = 1.0 / theta ** (np.arange(0, dimensions, 2) / dimensions)
    wavelengths = 2 * math.pi / frequencies
    smooth = (8192 / wavelengths - 1) / (4 - 1)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = np.where(wavelengths > 8192, frequencies / factor, frequencies)
    medium = (wavelengths >= 8192 / 4) & (wavelengths <= 8192)
    return (frequencies / np.where(medium, blended, scaled)).astype(np.float32)


def test_the_builtin_model_is_described_as_on_the_hub(builtin_files: ModelFiles) -> None:
    config = config_of(read_gguf(builtin_files.path))

    # From config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
    assert config["model_type"] == "llama"
    assert config["hidden_size"] == 576
    assert config["intermediate_size"] == 1536
    assert config["num_hidden_layers"] == 30
    assert config["num_attention_heads"] == 9
    assert config["num_key_value_heads"] == 3
    assert config["max_position_embeddings"] == 8192
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100000
    assert config["rope_scaling"] is None
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == 49152


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_each_llama_shaped_architecture_is_described(
    write_gguf: Callable[..., Path], architecture: str
) -> None:
    metadata = {f"{architecture}.attention.key_length": 32}
    tensors = {
        "token_embd.weight": np.zeros((32, 64), np.float32),
        "output.weight": np.zeros((32, 64), np.float32),
    }
    path = write_gguf(metadata, architecture=architecture, tensors=tensors)

    config = config_of(read_gguf(path))

    assert config["model_type"] == architecture
    assert config["head_dim"] == 32
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recovered_from_its_divisors(
    write_gguf: Callable[..., Path], factor: float
) -> None:
    divisors = llama3_divisors(500000.0, factor, 128)
    path = with_divisors(write_gguf, divisors)

    assert config_of(read_gguf(path))["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_divisors_are_refused_rather_than_run_wrongly(
    write_gguf: Callable[..., Path],
) -> None:
    path = with_divisors(write_gguf, np.linspace(1, 8, 64).astype(np.float32))

    with pytest.raises(ModelError, match="not Llama 3's"):
        config_of(read_gguf(path))


def with_divisors(write: Callable[..., Path], divisors: np.ndarray) -> Path:
    tensors = {
        "token_embd.weight": np.zeros((32, 64), np.float32),
        "rope_freqs.weight": divisors,
    }
    return write(tensors=tensors)


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32768,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_scaling_in_the_metadata_is_carried_over(
    write_gguf: Callable[..., Path], extra: dict[str, object], scaling: dict[str, object] | None
) -> None:
    path = write_gguf(extra)

    assert config_of(read_gguf(path))["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 8}, "only a part"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differs from layer to layer"),
        ({"llama.attention.head_count": 0}, r"damaged: llama\.attention\.head_count cannot be 0"),
        ({"llama.attention.head_count": "four"}, "damaged: .* cannot be 'four'"),
        ({"llama.rope.freq_base": "x"}, "damaged"),
        ({"llama.rope.freq_base": math.nan}, "damaged"),
    ],
)
def test_what_would_run_wrongly_is_refused(
    write_gguf: Callable[..., Path], extra: dict[str, object], reason: str
) -> None:
    path = write_gguf(extra)

    with pytest.raises(ModelError, match=reason):
        config_of(read_gguf(path))


def test_a_window_of_attention_is_carried_over(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf({"llama.attention.sliding_window": 128})

    assert config_of(read_gguf(path))["sliding_window"] == 128


def test_an_unknown_architecture_says_what_can_be_read(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(architecture="mamba")

    with pytest.raises(ModelError, match=r"'mamba'.*llama, mistral, qwen2, qwen3"):
        config_of(read_gguf(path))


def test_a_missing_number_is_named(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf({"llama.block_count": None})

    with pytest.raises(ModelError, match=r"lacks llama\.block_count"):
        config_of(read_gguf(path))


def test_a_file_without_embedding_is_no_model(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(tensors={"other": np.zeros(4, np.float32)})

    with pytest.raises(ModelError, match="no token embedding"):
        config_of(read_gguf(path))
