"""Which decoders the graph emitter knows, and the numbers that describe one of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_engine.rope import RopeScaling, rope_scaling

KNOWN_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""`model_type` values with the Llama layout: RMSNorm, rotary attention, gated SiLU MLP."""

_MOST_LAYERS = 1000
"""Several times what any published model has; a damaged file may say any number."""
_MOST_POSITIONS = 1 << 24
"""The graph holds a row of rotary numbers for each; more would fill the memory of a build."""
_MISTRAL_WINDOW = 4096
"""What transformers' MistralConfig assumes where config.json has no `sliding_window`."""


class UnknownArchitectureError(Exception):
    """The emitter cannot express this model; the message says which part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The numbers of one Llama-shaped decoder.

    `windows` has one entry per layer: how many tokens back, itself included, a token attends to;
    -1 means all of them.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    windows: tuple[int, ...]
    qk_norm: bool
    tied: bool


def llama_shape(config: Mapping[str, Any]) -> LlamaShape:
    """Read a Hugging Face `config.json`.

    Raises:
        UnknownArchitectureError: the emitter does not know this decoder.
    """
    try:
        return _shape(config)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UnknownArchitectureError(f"a config with an unusable value: {error}") from None


def _shape(config: Mapping[str, Any]) -> LlamaShape:
    family = str(config.get("model_type", "nothing"))
    if family not in KNOWN_FAMILIES:
        raise UnknownArchitectureError(f"model_type {family}")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnknownArchitectureError(f"activation {activation}")
    try:
        layers = int(config["num_hidden_layers"])
        hidden = int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        intermediate = int(config["intermediate_size"])
        vocab = int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnknownArchitectureError(f"a config without a usable {error}") from None
    if not 0 < layers <= _MOST_LAYERS:
        raise UnknownArchitectureError(f"{layers} layers")
    max_position = int(config.get("max_position_embeddings", 2048))
    if not 0 < max_position <= _MOST_POSITIONS:
        raise UnknownArchitectureError(f"{max_position} positions")
    head_dim = int(config.get("head_dim") or hidden // heads)
    # GroupQueryAttention's rotary kernel works in vectors of 16.
    if head_dim % 16:
        raise UnknownArchitectureError(f"head_dim {head_dim}, not a multiple of 16")
    # transformers 5 moved the rope numbers into one table.
    rope = config.get("rope_parameters") or {}
    rotary_share = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)))
    if rotary_share != 1:
        raise UnknownArchitectureError("rotary position on part of each head")
    try:
        scaling = rope_scaling(rope or config.get("rope_scaling"))
    except ValueError as error:
        raise UnknownArchitectureError(str(error)) from None
    return LlamaShape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        max_position=max_position,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rope_scaling=scaling,
        windows=_windows(family, layers, config),
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _windows(family: str, layers: int, config: Mapping[str, Any]) -> tuple[int, ...]:
    if family == "mistral":
        window = config.get("sliding_window", _MISTRAL_WINDOW)
        return (int(window) if window else -1,) * layers
    if family == "llama" or not config.get("use_sliding_window", False):
        return (-1,) * layers
    window = int(config.get("sliding_window") or -1)
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else -1 for kind in kinds)
    # Qwen2's older rule: full attention in the first layers, the window above them.
    first = int(config.get("max_window_layers", 0))
    return tuple(window if layer >= first else -1 for layer in range(layers))
