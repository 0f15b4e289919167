"""Another basis for the residual stream: the same decoder, without channels that stand out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_room import room
from tiny_models import TinyModel

from edge_engine.arch import llama_shape
from edge_engine.emit import emit_graph
from edge_engine.linear import float_linear
from edge_engine.manifest import Build, Manifest
from edge_engine.rotate import RotatedWeights, Rotation, hadamard
from edge_engine.runner import Runner
from edge_engine.weights import open_weights

IDS = np.random.default_rng(8).integers(0, 97, 40).tolist()

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-with-biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-of-odd-width": ("llama", {"hidden_size": 81}),
    "llama-of-wide-heads": ("llama", {"head_dim": 48}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def rotated(tiny: TinyModel) -> RotatedWeights:
    weights = open_weights(tiny.files)
    return RotatedWeights(weights, llama_shape(weights.config))


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_turned_decoder_has_the_same_logits(
    decoder: str, tiny_model: Callable[..., TinyModel], tmp_path: Path
) -> None:
    family, overrides = DECODERS[decoder]
    tiny = tiny_model(family, **overrides)
    weights = rotated(tiny)
    emit_graph(
        weights,
        weights.shape,
        tmp_path,
        linear=float_linear,
        ragged=True,
        on_read=lambda _: None,
    )
    manifest = Manifest(
        emitter=0,
        source="m",
        source_digest="",
        graph="gqa",
        precision="fp32",
        kv="float32",
        ragged=True,
        max_position=128,
        files={},
    )
    runner = Runner(Build(tmp_path, manifest), room(64), threads=1)
    np.testing.assert_allclose(runner.all_logits(IDS), tiny.logits(IDS), atol=1e-4, rtol=0)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 200))
def test_a_rotation_keeps_lengths_and_angles(size: int) -> None:
    matrix = Rotation(size).turn(np.eye(size, dtype=np.float32))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-5)


def test_a_vector_turns_like_a_row_and_always_the_same_way() -> None:
    rows = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
    turned = Rotation(96).turn(rows)
    np.testing.assert_array_equal(Rotation(96).turn(rows[1]), turned[1])


@pytest.mark.parametrize("size", [1, 2, 64])
def test_a_hadamard_matrix_is_its_own_inverse_and_even(size: int) -> None:
    matrix = hadamard(size)
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-6)
    np.testing.assert_allclose(np.abs(matrix), 1 / np.sqrt(size), rtol=1e-6)


@pytest.mark.parametrize("size", [576, 896, 2048])
def test_one_large_channel_becomes_many_even_ones(size: int) -> None:
    rows = 1000 * np.eye(size, dtype=np.float32)[::97]
    turned = Rotation(size).turn(rows)
    # Among so many Gaussian numbers the largest is 3.5 times their size or so, the channel was
    # 24 to 45 times.
    assert np.abs(turned).max() < 6 * np.sqrt(np.square(turned).mean())


def test_norms_between_layers_lose_their_weights_and_those_of_heads_keep_them(
    tiny_model: Callable[..., TinyModel],
) -> None:
    weights = rotated(tiny_model("qwen3"))
    prefix = "model.layers.1."
    for name in ("model.norm", prefix + "input_layernorm", prefix + "post_attention_layernorm"):
        assert (weights.read(f"{name}.weight") == 1).all()
    assert not (weights.read(f"{prefix}self_attn.q_norm.weight") == 1).any()


def test_a_tied_decoder_gets_a_head_of_its_own(tiny_model: Callable[..., TinyModel]) -> None:
    weights = rotated(tiny_model(tie_word_embeddings=True))
    assert not weights.shape.tied
    assert weights.elements["lm_head.weight"] == 64 * 97
    assert not np.allclose(
        weights.read("lm_head.weight"), weights.read("model.embed_tokens.weight"), atol=0.01
    )


def test_a_tensor_that_is_missing_is_a_key_error(tiny_model: Callable[..., TinyModel]) -> None:
    with pytest.raises(KeyError):
        rotated(tiny_model()).read("model.layers.7.mlp.up_proj.weight")
