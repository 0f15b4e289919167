"""The emitted graph against torch, for every decoder the emitter knows."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from tiny_models import TinyModel

from edge_engine.manifest import GRAPH_FILE, Build
from edge_engine.runner import Runner
from engine_core.models import ModelFiles

IDS = np.random.default_rng(3).integers(0, 97, 40).tolist()

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-with-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-head-per-kv": ("llama", {"num_key_value_heads": 4}),
    "llama-linear-rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3-rope": ("llama", {"rope_scaling": LLAMA3}),
    "llama-bfloat16": ("llama", {"dtype": "bfloat16"}),
    "llama-float16": ("llama", {"dtype": "float16"}),
    "llama-odd-widths": ("llama", {"hidden_size": 81, "intermediate_size": 71}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2-window-in-last-layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("decoder", DECODERS)
def test_logits_equal_those_of_torch(
    decoder: str,
    tiny_model: Callable[..., TinyModel],
    emitted: Callable[..., Runner],
) -> None:
    family, overrides = DECODERS[decoder]
    tiny = tiny_model(family, **overrides)
    model = emitted(tiny.files)
    np.testing.assert_allclose(model.all_logits(IDS), tiny.logits(IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_chunks_of_any_size_give_the_logits_of_one_piece(
    family: str,
    ragged: bool,
    tiny_model: Callable[..., TinyModel],
    emitted: Callable[..., Runner],
) -> None:
    window = {"sliding_window": 8} if family == "mistral" else {}
    model = emitted(tiny_model(family, **window).files, ragged=ragged)
    whole = model.all_logits(IDS)
    for size in (1, 2, 3, 16, 39):
        np.testing.assert_array_equal(model.all_logits(IDS, chunk=size), whole)


@pytest.mark.parametrize(
    ("decoder", "bound"),
    [
        ("llama-with-biases", 0.03),
        ("llama-odd-widths", 0.03),
        ("qwen2", 0.035),
        ("qwen3-tied", 0.03),
    ],
)
def test_int8_stays_close_to_float32(
    decoder: str,
    bound: float,
    tiny_model: Callable[..., TinyModel],
    emitted: Callable[..., Runner],
) -> None:
    family, overrides = DECODERS[decoder]
    tiny = tiny_model(family, **overrides)
    exact = tiny.logits(IDS)
    error = np.abs(emitted(tiny.files, "int8").all_logits(IDS) - exact).mean()
    # Two layers of products of bytes; a wrong scale or bias would be off by the logits' size.
    assert error < bound * np.abs(exact).mean()


def test_int8_stays_close_with_a_channel_that_drowns_the_others(
    tiny_model: Callable[..., TinyModel], emitted: Callable[..., Runner]
) -> None:
    import torch

    tiny = tiny_model()
    with torch.no_grad():
        for layer in tiny.torch_model.model.layers:
            layer.post_attention_layernorm.weight[5] = 60
            layer.mlp.gate_proj.weight[:, 5] /= 60
            layer.mlp.up_proj.weight[:, 5] /= 60
    tiny.torch_model.save_pretrained(tiny.files.path)
    exact = tiny.logits(IDS)
    error = np.abs(emitted(tiny.files, "int8").all_logits(IDS) - exact).mean()
    assert error < 0.03 * np.abs(exact).mean()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_linear_layer_of_an_int8_graph_computes_in_int8(
    family: str, tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    build = emit(tiny_model(family).files, "int8")
    graph = onnx.load(build.folder / GRAPH_FILE, load_external_data=False).graph
    kinds = Counter(node.op_type for node in graph.node)
    assert kinds["MatMulIntegerToFloat"] == 2 * 4 + 1
    # The float products turn what goes into the MLP's last product, and put the two bytes of the
    # vocabulary's wide values together.
    assert kinds["MatMul"] == 2 + 1
    assert "Gemm" not in kinds


def test_a_graph_without_query_seqlens_has_no_such_input(
    tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    files = tiny_model().files
    inputs = {}
    for ragged in (True, False):
        graph = onnx.load(
            emit(files, ragged=ragged).folder / GRAPH_FILE, load_external_data=False
        ).graph
        inputs[ragged] = {node.name for node in graph.input}
    assert inputs[True] - inputs[False] == {"query_seqlens"}


def test_a_gguf_file_gives_the_same_logits_as_its_safetensors(
    tiny_model: Callable[..., TinyModel],
    emitted: Callable[..., Runner],
    write_gguf: Callable[..., Any],
) -> None:
    tiny = tiny_model("llama", tie_word_embeddings=True, rope_theta=500000.0, rms_norm_eps=1e-5)
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {}
    for name, parameter in tiny.torch_model.state_dict().items():
        values = parameter.numpy()
        # llama.cpp keeps the two rotary halves of each head interleaved.
        if ".q_proj." in name or ".k_proj." in name:
            values = values.reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(values.shape)
        gguf = name.replace("model.layers.", "blk.")
        for theirs, ours in names.items():
            gguf = gguf.replace(theirs, ours)
        gguf = gguf.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
        if gguf != "lm_head.weight":
            tensors[gguf] = np.ascontiguousarray(values)
    path = write_gguf({"llama.feed_forward_length": 96}, tensors=tensors)
    model = emitted(ModelFiles(str(path), "gguf", path, "gguf", "digest"))
    np.testing.assert_allclose(model.all_logits(IDS), tiny.logits(IDS), atol=1e-4, rtol=0)
