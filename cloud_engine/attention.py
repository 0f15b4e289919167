"""Attention of transformers' decoders over a packed stream of many sequences' tokens.

An unmodified model computes the stream `[1, T]` as if it were one sequence; what a token sees is
decided here. Keys and values lie in blocks, `[blocks, block_size, kv_heads, head_dim]` for each
layer, and a sequence's row in `tables` names its blocks in order. Block 0 belongs to nobody: what
pads a stream writes and reads there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from cloud_engine.span_attention import Spans, attend_spans
from engine_core.errors import ModelError

ATTENTION = "tidegate_packed"
"""What this attention is called among transformers' `attn_implementation`s."""
_ELSEWHERE = (
    "so this engine cannot serve it; serve it with vLLM or SGLang and name that server as a 'url' "
    "target."
)
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_NOT_COMPUTED = {
    "softcap": "caps its attention's scores",
    "s_aux": "has attention sinks",
    "sinks": "has attention sinks",
    "indices": "attends to chosen tokens alone",
    "block_indices": "attends to chosen tokens alone",
    "position_bias": "adds a bias to its attention's scores",
}
"""Keyword arguments that transformers' models hand to their attention, and what they mean."""


class PagedOps(NamedTuple):
    """Writing and reading blocks, on one kind of device; see `write` and `attend`."""

    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    attend: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Where the tokens of a packed stream belong; the model passes it on to its attention.

    Args:
        slots: int64 `[T]`, where the keys and values of each token go:
            `block * block_size + place in the block`.
        contexts: int32 `[T]`, how many tokens each sees, itself included.
        table_rows: int32 `[T]`, the row of `tables` of each.
        tables: int32 `[rows, blocks of the longest sequence]`, ids of blocks.
        keys: The blocks of each layer.
        values: The same.
        ops: The device's.
        spans: All tokens of the stream, for attention with torch's own kernels; None for attention
            token by token, which reads nothing of this step's on the host and so can be captured in
            a graph.
    """

    slots: torch.Tensor
    contexts: torch.Tensor
    table_rows: torch.Tensor
    tables: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    ops: PagedOps
    spans: Spans | None = None


def check_supported(model: Any) -> None:
    """Check that a packed stream can stand in for a transformers model's sequences.

    Raises:
        ModelError: the model has layers that look back by other means than this attention.
    """
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS)
    if others:
        what = f"has layers of {others[0].replace('_', ' ')}"
    elif model.config.is_encoder_decoder:
        what = "has an encoder"
    elif getattr(model, "_is_stateful", False):
        what = "keeps a recurrent state"
    elif getattr(config, "num_kv_shared_layers", 0):
        what = "shares keys and values between layers"
    elif not getattr(model, "_supports_attention_backend", False):
        what = "brings its own attention"
    else:
        return
    raise ModelError(f"{type(model).__name__} {what}, {_ELSEWHERE}")


def paged_ops(device: torch.device) -> PagedOps:
    """Return what writes and reads blocks on a device."""
    if device.type == "cuda":
        # Triton is only there where CUDA is.
        from cloud_engine import kernels  # noqa: PLC0415

        return PagedOps(kernels.write, kernels.attend)
    return REFERENCE


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackedStep | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Write the stream's keys and values into their blocks and attend to what each token sees.

    Args:
        module: The layer's attention.
        query: `[1, heads, T, head_dim]`.
        key: `[1, kv_heads, T, head_dim]`.
        value: The same.
        attention_mask: None, since transformers makes none for attention that is not its own.
        scaling: What scores are multiplied with; None for `head_dim ** -0.5`.
        sliding_window: How many of the latest tokens, itself included, a token sees.
        packed: Where the tokens belong.
        rest: What models hand over besides; dropout is 0 in inference.

    Returns:
        `[1, T, heads, head_dim]`, and no weights.

    Raises:
        ModelError: the model wants of its attention what is not computed here.
    """
    if packed is None:
        raise _not_computed(module, "does not pass on where its tokens belong")
    for name, what in _NOT_COMPUTED.items():
        if rest.get(name) is not None:
            raise _not_computed(module, what)
    if not getattr(module, "is_causal", True):
        raise _not_computed(module, "looks at later tokens")
    if attention_mask is not None:
        raise _not_computed(module, "masks its attention by itself")
    if key.shape != value.shape:
        raise _not_computed(module, "has keys and values of different sizes")
    keys_cache, values_cache = packed.keys[module.layer_idx], packed.values[module.layer_idx]
    queries, keys, values = (
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
    )
    packed.ops.write(keys, values, packed.slots, keys_cache, values_cache)
    scale = queries.shape[2] ** -0.5 if scaling is None else scaling
    if packed.spans is None:
        out = packed.ops.attend(
            queries,
            keys_cache,
            values_cache,
            tables=packed.tables,
            table_rows=packed.table_rows,
            contexts=packed.contexts,
            scale=scale,
            window=sliding_window,
        )
    else:
        out = attend_spans(
            queries,
            keys_cache,
            values_cache,
            spans=packed.spans,
            tables=packed.tables,
            scale=scale,
            window=sliding_window,
        )
    return out[None], None


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    keys_cache: torch.Tensor,
    values_cache: torch.Tensor,
) -> None:
    """Put keys and values `[T, kv_heads, head_dim]` where `slots`, int64 `[T]`, says."""
    keys_cache.flatten(0, 1).index_copy_(0, slots, key)
    values_cache.flatten(0, 1).index_copy_(0, slots, value)


def attend(
    query: torch.Tensor,
    keys_cache: torch.Tensor,
    values_cache: torch.Tensor,
    *,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    contexts: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend token by token; return `[T, heads, head_dim]`.

    Reads nothing on the host, so that it can be captured. Takes `T` times the memory of the longest
    sequence: it is what kernels are measured by.

    Args:
        query: `[T, heads, head_dim]`.
        keys_cache: `[blocks, block_size, kv_heads, head_dim]`.
        values_cache: The same.
        tables: int32 `[rows, blocks of the longest sequence]`.
        table_rows: int32 `[T]`.
        contexts: int32 `[T]`, at least 1.
        scale: What scores are multiplied with.
        window: How many of its latest tokens a token sees; None for all.
    """
    blocks = tables[table_rows]  # [T, blocks]
    keys = keys_cache[blocks].flatten(1, 2).float()  # [T, places, kv_heads, head_dim]
    values = values_cache[blocks].flatten(1, 2).float()
    places = torch.arange(keys.shape[1], device=query.device)
    seen = places < contexts[:, None]  # [T, places]
    if window is not None:
        seen &= places >= contexts[:, None] - window
    grouped = query.float().unflatten(1, (keys.shape[2], -1))  # [T, kv_heads, group, head_dim]
    scores = torch.einsum("tkgd,tpkd->tkgp", grouped, keys) * scale
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(dim=3)
    # Where nothing was written yet there may be NaN, which a weight of 0 would let through.
    values = values.masked_fill(~seen[:, :, None, None], 0)
    return torch.einsum("tkgp,tpkd->tkgd", weights, values).flatten(1, 2).to(query.dtype)


REFERENCE = PagedOps(write, attend)
"""By torch's own operations, on any device."""


def _not_computed(module: Any, what: str) -> ModelError:
    return ModelError(f"{type(module).__name__} {what}, {_ELSEWHERE}")


AttentionInterface.register(ATTENTION, packed_attention)
