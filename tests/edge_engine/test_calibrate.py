"""Smoothing: what it may not change, and what it is for."""

from collections.abc import Callable

import numpy as np
import pytest
from tiny_models import TinyModel
from tiny_tokenizer import BYTE_VOCABULARY, save_byte_tokenizer

from edge_engine.arch import LlamaShape, llama_shape
from edge_engine.calibrate import calibration_ids, channel_sizes, smoothing, watched_values
from edge_engine.manifest import Build
from edge_engine.runner import Runner
from edge_engine.weights import Weights, open_weights
from engine_core.models import ModelFiles

IDS = np.random.default_rng(8).integers(0, 97, 40).tolist()


def opened(files: ModelFiles) -> tuple[Weights, LlamaShape]:
    weights = open_weights(files)
    return weights, llama_shape(weights.config)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_smoothing_changes_no_logit(
    family: str,
    overrides: dict[str, bool],
    tiny_model: Callable[..., TinyModel],
    emitted: Callable[..., Runner],
) -> None:
    tiny = tiny_model(family, **overrides)
    _, shape = opened(tiny.files)
    rng = np.random.default_rng(4)
    widths = {"product": shape.intermediate}
    divisors = {
        name: rng.uniform(0.2, 5, widths.get(name.split("_")[0], shape.hidden)).astype(np.float32)
        for name in watched_values(shape)
    }
    model = emitted(tiny.files, smoothing=divisors)
    np.testing.assert_allclose(model.all_logits(IDS), tiny.logits(IDS), atol=1e-4, rtol=0)


def test_channel_sizes_are_those_that_torch_sees(
    tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    tiny = tiny_model()
    _, shape = opened(tiny.files)
    seen: dict[str, np.ndarray] = {}
    layers = tiny.torch_model.model.layers
    linears = {
        "normed_1": layers[1].self_attn.q_proj,
        "mlp_normed_1": layers[1].mlp.up_proj,
        "product_0": layers[0].mlp.down_proj,
        "normed_2": tiny.torch_model.lm_head,
    }
    for name, linear in linears.items():
        linear.register_forward_pre_hook(
            lambda _, inputs, name=name: seen.update({name: inputs[0][0].numpy()})
        )
    texts = [IDS * 2, IDS[:7]]  # longer and shorter than a chunk
    squares = dict.fromkeys(linears, 0.0)
    for ids in texts:
        tiny.logits(ids)
        for name, rows in seen.items():
            squares[name] = squares[name] + np.square(rows).sum(axis=0)
    for ragged in (True, False):
        build = emit(tiny.files, ragged=ragged, extra_outputs=watched_values(shape))
        sizes = channel_sizes(build.folder, shape, texts, ragged=ragged)
        assert sizes.keys() == set(watched_values(shape))
        for name, total in squares.items():
            np.testing.assert_allclose(sizes[name], np.sqrt(total / 87), rtol=1e-4)


def test_smoothing_keeps_an_outlying_channel_from_drowning_its_neighbours(
    tiny_model: Callable[..., TinyModel],
    emit: Callable[..., Build],
    emitted: Callable[..., Runner],
) -> None:
    import torch

    tiny = tiny_model()
    with torch.no_grad():
        for layer in tiny.torch_model.model.layers:
            layer.post_attention_layernorm.weight[5] = 60
            layer.mlp.gate_proj.weight[:, 5] /= 60
            layer.mlp.up_proj.weight[:, 5] /= 60
    tiny.torch_model.save_pretrained(tiny.files.path)
    weights, shape = opened(tiny.files)
    build = emit(tiny.files, extra_outputs=watched_values(shape))
    divisors = smoothing(weights, shape, channel_sizes(build.folder, shape, [IDS], ragged=True))
    exact = tiny.logits(IDS)
    plain = np.abs(emitted(tiny.files, "int8").all_logits(IDS) - exact).mean()
    smooth = np.abs(emitted(tiny.files, "int8", smoothing=divisors).all_logits(IDS) - exact)
    assert smooth.mean() < plain / 2


def test_a_channel_that_is_never_used_divides_by_a_finite_number(
    tiny_model: Callable[..., TinyModel],
) -> None:
    weights, shape = opened(tiny_model().files)
    dead = np.zeros(shape.hidden, np.float32)
    divisors = smoothing(weights, shape, {"normed_0": dead, "normed_2": dead})
    for divisor in divisors.values():
        assert np.isfinite(divisor).all()
        assert (divisor > 0).all()


def test_calibration_reads_a_text_and_a_conversation(tiny_model: Callable[..., TinyModel]) -> None:
    files = tiny_model(vocab_size=BYTE_VOCABULARY).files
    save_byte_tokenizer(files.path)
    text, conversation = calibration_ids(files, limit=100)
    assert len(text) == 100
    assert 0 < len(conversation) <= 100
    assert text != conversation


def test_a_model_without_a_chat_template_is_calibrated_on_text_alone(
    tiny_model: Callable[..., TinyModel],
) -> None:
    files = tiny_model(vocab_size=BYTE_VOCABULARY).files
    save_byte_tokenizer(files.path)
    (files.path / "tokenizer_config.json").unlink()
    assert len(calibration_ids(files, limit=100)) == 1
