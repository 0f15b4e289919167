"""What the emitter knows, and what it leaves to optimum."""

from typing import Any

import pytest

from edge_engine.arch import UnknownArchitectureError, llama_shape

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 97,
}


def test_head_numbers_follow_from_the_hidden_size_where_the_config_is_silent() -> None:
    shape = llama_shape(CONFIG)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 4, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type gpt2"),
        ({"model_type": "mixtral"}, "model_type mixtral"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"head_dim": 24}, "head_dim 24"),
        ({"partial_rotary_factor": 0.5}, "part of each head"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope scaling dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling linear without 'factor'"),
        ({"hidden_size": "many"}, "many"),
        ({"num_hidden_layers": [1, 2]}, "config without a usable"),
        ({"num_hidden_layers": 10**12}, "1000000000000 layers"),
        ({"max_position_embeddings": 10**12}, "1000000000000 positions"),
        ({"max_position_embeddings": 0}, "0 positions"),
        ({"num_attention_heads": 0, "head_dim": None}, "unusable value"),
        ({"rope_theta": "x"}, "unusable value"),
        ({"rope_scaling": 3}, "unusable value"),
        ({"max_position_embeddings": []}, "unusable value"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": 1}, "unusable value"),
    ],
)
def test_what_the_emitter_cannot_express_is_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnknownArchitectureError, match=reason):
        llama_shape(CONFIG | change)


def test_a_config_without_a_needed_number_is_not_known() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    with pytest.raises(UnknownArchitectureError, match="vocab_size"):
        llama_shape(config)


def test_rope_numbers_are_found_in_both_generations_of_configs() -> None:
    old = llama_shape(CONFIG | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}})
    new = llama_shape(
        CONFIG | {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}
    )
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling is not None


@pytest.mark.parametrize(
    ("family", "change", "windows"),
    [
        ("llama", {"sliding_window": 8}, (-1, -1, -1, -1)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("mistral", {"sliding_window": None}, (-1, -1, -1, -1)),
        ("mistral", {}, (4096, 4096, 4096, 4096)),
        ("qwen2", {"sliding_window": 8}, (-1, -1, -1, -1)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            (-1, -1, -1, 8),
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, -1, 8, -1),
        ),
    ],
)
def test_each_layer_gets_its_own_window(
    family: str, change: dict[str, Any], windows: tuple[int, ...]
) -> None:
    assert llama_shape(CONFIG | {"model_type": family} | change).windows == windows
