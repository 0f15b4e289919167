"""Write a Llama-shaped decoder as one small ONNX graph around GroupQueryAttention.

`edge_engine.graph_interface` says what goes in and out.

Values between the layers that other modules refer to by name, each with one row for a token:
`normed_i` goes into the attention of layer i (and, after the last layer, into the vocabulary),
`attended_rows_i` comes out of it, `mlp_normed_i` goes into the MLP and `product_i` into the MLP's
last product.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_engine.arch import LlamaShape
from edge_engine.external_data import ExternalData
from edge_engine.graph_interface import graph_inputs, graph_outputs
from edge_engine.graph_writer import CONTRIB_DOMAIN, GraphWriter
from edge_engine.linear import Linear
from edge_engine.manifest import DATA_FILE, GRAPH_FILE, KvPrecision
from edge_engine.rope import cos_sin_tables
from edge_engine.run_inputs import SLACK
from edge_engine.weights import Weights, is_tied

# Inputs of GroupQueryAttention that not every graph has; those between them stay empty.
_KEY_SCALES_INPUT, _VALUE_SCALES_INPUT, _QUERY_SEQLENS_INPUT = 12, 13, 16


def emit_graph(
    weights: Weights,
    shape: LlamaShape,
    folder: Path,
    *,
    linear: Linear,
    ragged: bool,
    on_read: Callable[[int], object],
    kv_scales: Mapping[str, NDArray[np.float32]] | None = None,
    extra_outputs: Iterable[str] = (),
) -> None:
    """Write `model.onnx` and its data file into an existing folder.

    Args:
        weights: Where tensors come from; read one at a time, each once (a tied head twice).
        shape: The decoder's numbers.
        folder: Receives the two files.
        linear: How the graph multiplies with weights.
        ragged: Whether the graph has the input `query_seqlens`.
        on_read: Called after each tensor with its float32 bytes.
        kv_scales: What one step of int8 keys and values is worth; see `edge_engine.kv_scales`. None
            keeps them in float32.
        extra_outputs: Values named above that become outputs of the graph.

    Raises:
        KeyError: a tensor that this shape needs is missing.
        ModelError: a tensor holds infinities or NaN.
    """
    with ExternalData(folder, DATA_FILE) as data:
        graph = GraphWriter(data)
        _Emitter(
            weights, shape, graph, linear, ragged=ragged, on_read=on_read, kv_scales=kv_scales
        ).emit()
        kv: KvPrecision = "float32" if kv_scales is None else "int8"
        model = graph.model(graph_inputs(shape, ragged=ragged, kv=kv), graph_outputs(shape, kv=kv))
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in extra_outputs
    )
    (folder / GRAPH_FILE).write_bytes(model.SerializeToString())


class _Emitter:
    def __init__(
        self,
        weights: Weights,
        shape: LlamaShape,
        graph: GraphWriter,
        linear: Linear,
        *,
        ragged: bool,
        on_read: Callable[[int], object],
        kv_scales: Mapping[str, NDArray[np.float32]] | None,
    ) -> None:
        self._weights = weights
        self._shape = shape
        self._graph = graph
        self._linear = linear
        self._ragged = ragged
        self._on_read = on_read
        self._kv_scales = kv_scales

    def emit(self) -> None:
        shape = self._shape
        self._graph.tensor(
            "places_of_heads", np.array([-1, shape.heads * shape.head_dim], np.int64)
        )
        cos, sin = cos_sin_tables(
            shape.rope_theta, shape.head_dim, shape.max_position + SLACK, shape.rope_scaling
        )
        self._graph.tensor("cos_cache", cos)
        self._graph.tensor("sin_cache", sin)
        # float32 and mapped from the file: a step reads one row of it per token.
        self._graph.tensor("embedding", self._read("model.embed_tokens.weight"))
        self._graph.node("Gather", ["embedding", "input_ids"], ["residual_0"])
        self._gamma("norm_0", "model.layers.0.input_layernorm.weight")
        self._norm("residual_0", "norm_0", "normed_0")
        for layer in range(shape.layers):
            self._layer(layer)
        head = "model.embed_tokens" if is_tied(self._weights, shape) else "lm_head"
        self._product("logits", f"normed_{shape.layers}", [head])

    def _layer(self, layer: int) -> None:
        shape = self._shape
        prefix = f"model.layers.{layer}."
        residual = f"residual_{layer}"
        places = "packed_rows"
        if layer == shape.layers - 1:
            # Nothing after the last attention looks at other tokens: drop rows nobody asked for.
            places = "asked_places"
            self._graph.node("Gather", ["packed_rows", "logit_rows"], [places])
            self._graph.node("Gather", [residual, "logit_rows"], ["asked_residual"])
            residual = "asked_residual"
        attended = self._attention(layer, prefix, f"normed_{layer}", places)
        out = self._product(f"o_{layer}", attended, [prefix + "self_attn.o_proj"])
        self._gamma(f"mlp_norm_{layer}", prefix + "post_attention_layernorm.weight")
        self._skip_norm(
            out, residual, f"mlp_norm_{layer}", f"mlp_normed_{layer}", f"mlp_residual_{layer}"
        )
        gate_up = self._product(
            f"gate_up_{layer}",
            f"mlp_normed_{layer}",
            [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"],
        )
        gate, up, silu, product = (f"{part}_{layer}" for part in ("gate", "up", "silu", "product"))
        self._graph.node("Split", [gate_up], [gate, up], axis=-1, num_outputs=2)
        # x * sigmoid(1.0 * x) is SiLU, in one kernel.
        self._graph.node("QuickGelu", [gate], [silu], domain=CONTRIB_DOMAIN, alpha=1.0)
        self._graph.node("Mul", [silu, up], [product])
        down = self._product(f"down_{layer}", product, [prefix + "mlp.down_proj"])
        following = layer + 1
        self._gamma(
            f"norm_{following}",
            "model.norm.weight"
            if following == shape.layers
            else f"model.layers.{following}.input_layernorm.weight",
        )
        self._skip_norm(
            down,
            f"mlp_residual_{layer}",
            f"norm_{following}",
            f"normed_{following}",
            None if following == shape.layers else f"residual_{following}",
        )

    def _attention(self, layer: int, prefix: str, normed: str, places: str) -> str:
        """Emit attention; return its output for the tokens whose places are given, one a row."""
        shape = self._shape
        projections = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        # One tensor, or one each for query, key and value.
        parts = [self._product(f"qkv_{layer}", normed, projections)]
        if shape.qk_norm:
            parts = self._normed_heads(layer, prefix, parts[0])
        for part in parts:
            self._graph.node("Gather", [part, "attention_rows"], [f"spread_{part}"])
        spread = [f"spread_{part}" for part in parts]
        inputs = [
            *spread,
            *[""] * (3 - len(spread)),
            f"past_key_{layer}",
            f"past_value_{layer}",
            "seqlens_k",
            "total_sequence_length",
            "cos_cache",
            "sin_cache",
        ]
        further: dict[int, str] = {}
        attributes: dict[str, str | int] = {}
        if self._kv_scales is not None:
            for place, kind in ((_KEY_SCALES_INPUT, "key"), (_VALUE_SCALES_INPUT, "value")):
                further[place] = f"{kind}_scales_{layer}"
                self._graph.tensor(further[place], self._kv_scales[f"{kind}_{layer}"][None])
            attributes = {
                "k_quant_type": "PER_CHANNEL",
                "v_quant_type": "PER_CHANNEL",
                "kv_cache_bit_width": 8,
            }
        if self._ragged:
            further[_QUERY_SEQLENS_INPUT] = "query_seqlens"
        inputs += [
            further.get(place, "") for place in range(len(inputs), 1 + max(further, default=0))
        ]
        attended = f"attended_{layer}"
        self._graph.node(
            "GroupQueryAttention",
            inputs,
            [attended, f"present_key_{layer}", f"present_value_{layer}"],
            domain=CONTRIB_DOMAIN,
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
            do_rotary=1,
            local_window_size=shape.windows[layer],
            **attributes,
        )
        self._graph.node("Reshape", [attended, "places_of_heads"], [f"attended_places_{layer}"])
        self._graph.node("Gather", [f"attended_places_{layer}", places], [f"attended_rows_{layer}"])
        return f"attended_rows_{layer}"

    def _normed_heads(self, layer: int, prefix: str, packed: str) -> list[str]:
        """Split packed QKV and normalise each query and key head (Qwen3)."""
        shape = self._shape
        widths = [shape.heads * shape.head_dim] + [shape.kv_heads * shape.head_dim] * 2
        parts = [f"{part}_{layer}" for part in ("query", "key", "value")]
        if layer == 0:
            self._graph.tensor("qkv_widths", np.array(widths, np.int64))
            # 0 copies a dimension: [T, heads * head_dim] <-> [T, heads, head_dim]
            for part, width in (("query", widths[0]), ("key", widths[1])):
                heads = width // shape.head_dim
                self._graph.tensor(f"{part}_heads", np.array([0, heads, shape.head_dim], np.int64))
                self._graph.tensor(f"{part}_flat", np.array([0, width], np.int64))
        self._graph.node("Split", [packed, "qkv_widths"], parts, axis=-1)
        flat = []
        for part, weight in (("query", "q_norm"), ("key", "k_norm")):
            name = f"{part}_{layer}"
            self._gamma(f"{name}_gamma", f"{prefix}self_attn.{weight}.weight")
            self._graph.node("Reshape", [name, f"{part}_heads"], [f"{name}_heads"])
            self._norm(f"{name}_heads", f"{name}_gamma", f"{name}_normed")
            self._graph.node("Reshape", [f"{name}_normed", f"{part}_flat"], [f"{name}_flat"])
            flat.append(f"{name}_flat")
        return [*flat, parts[2]]

    def _product(self, name: str, value: str, layers: list[str]) -> str:
        """Multiply with the weights of `layers` side by side; return the name of the result."""
        weight = np.concatenate([self._read(f"{layer}.weight") for layer in layers])  # [N, K]
        bias = None
        if any(f"{layer}.bias" in self._weights.elements for layer in layers):
            bias = np.concatenate([self._read(f"{layer}.bias") for layer in layers])
        self._linear(self._graph, name, value, weight, bias)
        return name

    def _gamma(self, name: str, source: str) -> None:
        self._graph.tensor(name, self._read(source))

    def _norm(self, value: str, gamma: str, out: str) -> None:
        self._graph.node(
            "SimplifiedLayerNormalization",
            [value, gamma],
            [out],
            axis=-1,
            epsilon=self._shape.norm_eps,
            stash_type=1,
        )

    def _skip_norm(self, value: str, skip: str, gamma: str, out: str, total: str | None) -> None:
        outputs = [out] if total is None else [out, "", "", total]
        self._graph.node(
            "SkipSimplifiedLayerNormalization",
            [value, skip, gamma],
            outputs,
            domain=CONTRIB_DOMAIN,
            epsilon=self._shape.norm_eps,
        )

    def _read(self, name: str) -> NDArray[np.float32]:
        values = self._weights.read(name)
        self._on_read(values.nbytes)
        return values
