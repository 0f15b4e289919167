"""Write a Llama-shaped decoder as one small ONNX graph around GroupQueryAttention.

`edge_engine.graph_interface` says what goes in and out.

Values between the layers that other modules refer to by name: `normed_i` goes into the attention
of layer i (and, after the last layer, into the vocabulary), `mlp_normed_i` into its MLP and
`product_i` into the MLP's last product.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_engine.arch import LlamaShape
from edge_engine.external_data import ExternalData
from edge_engine.graph_interface import graph_inputs, graph_outputs
from edge_engine.manifest import DATA_FILE, GRAPH_FILE, KvPrecision, Precision
from edge_engine.nbits import CONTRIB_DOMAIN, nbits_node
from edge_engine.quantize import quantize_weight
from edge_engine.rope import cos_sin_tables
from edge_engine.run_inputs import SLACK
from edge_engine.weights import Weights, is_tied
from engine_core.errors import ModelError

# Inputs of GroupQueryAttention that not every graph has; those between them stay empty.
_KEY_SCALES_INPUT, _VALUE_SCALES_INPUT, _QUERY_SEQLENS_INPUT = 12, 13, 16
_OPSET = 18
_IR_VERSION = 10


def emit_graph(
    weights: Weights,
    shape: LlamaShape,
    folder: Path,
    *,
    precision: Precision,
    ragged: bool,
    on_read: Callable[[int], object],
    smoothing: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    kv_scales: Mapping[str, NDArray[np.float32]] | None = None,
    extra_outputs: Iterable[str] = (),
) -> None:
    """Write `model.onnx` and its data file into an existing folder.

    Args:
        weights: Where tensors come from; read one at a time, each once (a tied head twice).
        shape: The decoder's numbers.
        folder: Receives the two files.
        precision: `int8` for 8-bit blocks in every linear layer, `fp32` for parity checks.
        ragged: Whether the graph has the input `query_seqlens`.
        on_read: Called after each tensor with its float32 bytes.
        smoothing: For values named above, what each channel is divided by; the weights that make
            and use the value take it up, so that the logits stay the same.
        kv_scales: What one step of int8 keys and values is worth; see `edge_engine.kv_scales`. None
            keeps them in float32.
        extra_outputs: Values named above that become outputs of the graph.

    Raises:
        KeyError: a tensor that this shape needs is missing.
        ModelError: a tensor holds infinities or NaN.
    """
    with ExternalData(folder, DATA_FILE) as data:
        emitter = _Emitter(
            weights,
            shape,
            data,
            precision=precision,
            ragged=ragged,
            on_read=on_read,
            smoothing=smoothing,
            kv_scales=kv_scales,
        )
        model = emitter.model()
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in extra_outputs
    )
    (folder / GRAPH_FILE).write_bytes(model.SerializeToString())


class _Emitter:
    def __init__(
        self,
        weights: Weights,
        shape: LlamaShape,
        data: ExternalData,
        *,
        precision: Precision,
        ragged: bool,
        on_read: Callable[[int], object],
        smoothing: Mapping[str, NDArray[np.float32]],
        kv_scales: Mapping[str, NDArray[np.float32]] | None,
    ) -> None:
        self._weights = weights
        self._shape = shape
        self._data = data
        self._precision = precision
        self._ragged = ragged
        self._on_read = on_read
        self._smoothing = smoothing
        self._kv_scales = kv_scales
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        shape = self._shape
        self._tensor("places_of_heads", np.array([-1, shape.heads * shape.head_dim], np.int64))
        cos, sin = cos_sin_tables(
            shape.rope_theta, shape.head_dim, shape.max_position + SLACK, shape.rope_scaling
        )
        self._tensor("cos_cache", cos)
        self._tensor("sin_cache", sin)
        # float32 and mapped from the file: a step reads one row of it per token.
        self._tensor("embedding", self._read("model.embed_tokens.weight"))
        self._node("Gather", ["embedding", "input_ids"], ["residual_0"])
        self._gamma("norm_0", "model.layers.0.input_layernorm.weight", "normed_0")
        self._norm("residual_0", "norm_0", "normed_0")
        for layer in range(shape.layers):
            self._layer(layer)
        self._head(f"normed_{shape.layers}")
        kv: KvPrecision = "float32" if self._kv_scales is None else "int8"
        graph = helper.make_graph(
            self._nodes,
            "decoder",
            graph_inputs(shape, ragged=self._ragged, kv=kv),
            graph_outputs(shape, kv=kv),
            self._initializers,
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(CONTRIB_DOMAIN, 1)],
            ir_version=_IR_VERSION,
            producer_name="tidegate",
        )

    def _layer(self, layer: int) -> None:
        shape = self._shape
        prefix = f"model.layers.{layer}."
        residual = f"residual_{layer}"
        places = "packed_rows"
        if layer == shape.layers - 1:
            # Nothing after the last attention looks at other tokens: drop rows nobody asked for.
            places = "asked_places"
            self._node("Gather", ["packed_rows", "logit_rows"], [places])
            self._node("Gather", [residual, "logit_rows"], ["asked_residual"])
            residual = "asked_residual"
        attended = self._attention(layer, prefix, f"normed_{layer}", places)
        out = self._linear(f"o_{layer}", attended, [prefix + "self_attn.o_proj"])
        self._gamma(
            f"mlp_norm_{layer}", prefix + "post_attention_layernorm.weight", f"mlp_normed_{layer}"
        )
        self._skip_norm(
            out, residual, f"mlp_norm_{layer}", f"mlp_normed_{layer}", f"mlp_residual_{layer}"
        )
        gate_up = self._linear(
            f"gate_up_{layer}",
            f"mlp_normed_{layer}",
            [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"],
            # What divides the product can divide one of its factors.
            divisors={prefix + "mlp.up_proj": self._smoothing.get(f"product_{layer}")},
        )
        gate, up, silu, product = (f"{part}_{layer}" for part in ("gate", "up", "silu", "product"))
        self._node("Split", [gate_up], [gate, up], axis=-1, num_outputs=2)
        # x * sigmoid(1.0 * x) is SiLU, in one kernel.
        self._node("QuickGelu", [gate], [silu], domain=CONTRIB_DOMAIN, alpha=1.0)
        self._node("Mul", [silu, up], [product])
        down = self._linear(f"down_{layer}", product, [prefix + "mlp.down_proj"])
        following = layer + 1
        self._gamma(
            f"norm_{following}",
            "model.norm.weight"
            if following == shape.layers
            else f"model.layers.{following}.input_layernorm.weight",
            f"normed_{following}",
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
        parts = [self._linear(f"qkv_{layer}", normed, projections)]
        if shape.qk_norm:
            parts = self._normed_heads(layer, prefix, parts[0])
        for part in parts:
            self._node("Gather", [part, "attention_rows"], [f"spread_{part}"])
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
                self._tensor(further[place], self._kv_scales[f"{kind}_{layer}"][None])
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
        self._node(
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
        self._node("Reshape", [attended, "places_of_heads"], [f"attended_places_{layer}"])
        self._node("Gather", [f"attended_places_{layer}", places], [f"attended_rows_{layer}"])
        return f"attended_rows_{layer}"

    def _normed_heads(self, layer: int, prefix: str, packed: str) -> list[str]:
        """Split packed QKV and normalise each query and key head (Qwen3)."""
        shape = self._shape
        widths = [shape.heads * shape.head_dim] + [shape.kv_heads * shape.head_dim] * 2
        parts = [f"{part}_{layer}" for part in ("query", "key", "value")]
        if layer == 0:
            self._tensor("qkv_widths", np.array(widths, np.int64))
            # 0 copies a dimension: [T, heads * head_dim] <-> [T, heads, head_dim]
            for part, width in (("query", widths[0]), ("key", widths[1])):
                heads = width // shape.head_dim
                self._tensor(f"{part}_heads", np.array([0, heads, shape.head_dim], np.int64))
                self._tensor(f"{part}_flat", np.array([0, width], np.int64))
        self._node("Split", [packed, "qkv_widths"], parts, axis=-1)
        flat = []
        for part, weight in (("query", "q_norm"), ("key", "k_norm")):
            name = f"{part}_{layer}"
            self._gamma(f"{name}_gamma", f"{prefix}self_attn.{weight}.weight")
            self._node("Reshape", [name, f"{part}_heads"], [f"{name}_heads"])
            self._norm(f"{name}_heads", f"{name}_gamma", f"{name}_normed")
            self._node("Reshape", [f"{name}_normed", f"{part}_flat"], [f"{name}_flat"])
            flat.append(f"{name}_flat")
        return [*flat, parts[2]]

    def _head(self, normed: str) -> None:
        tied = is_tied(self._weights, self._shape)
        source = "model.embed_tokens" if tied else "lm_head"
        if self._precision == "int8" or normed in self._smoothing:
            self._linear("logits", normed, [source])
            return
        table = "embedding"
        if not tied:
            table = "lm_head"
            self._tensor(table, self._read("lm_head.weight"))
        self._node("Gemm", [normed, table], ["logits"], transB=1)

    def _linear(
        self,
        name: str,
        value: str,
        layers: list[str],
        divisors: Mapping[str, NDArray[np.float32] | None] = MappingProxyType({}),
    ) -> str:
        """Emit one product with the weights of `layers` side by side; return its output.

        `divisors` divide the outputs of some of the layers.
        """
        parts = [self._read(f"{layer}.weight") for layer in layers]
        for index, layer in enumerate(layers):
            divisor = divisors.get(layer)
            if divisor is not None:
                parts[index] = parts[index] / divisor[:, None]
        weight = np.concatenate(parts)  # [N, K]
        if value in self._smoothing:
            weight *= self._smoothing[value]
        bias = self._bias(name, layers, divisors)
        if self._precision == "fp32":
            self._tensor(f"{name}_weight", weight.T)
            product = name if bias is None else f"{name}_product"
            self._node("MatMul", [value, f"{name}_weight"], [product])
            if bias is not None:
                self._node("Add", [product, bias], [name])
            return name
        blocks = quantize_weight(weight)
        self._tensor(f"{name}_weight", blocks.values)
        self._tensor(f"{name}_scales", blocks.scales)
        self._tensor(f"{name}_zeros", blocks.zero_points)
        quantized = [f"{name}_weight", f"{name}_scales", f"{name}_zeros"]
        self._nodes.append(nbits_node(value, quantized, bias, name, weight.shape))
        return name

    def _bias(
        self,
        name: str,
        layers: list[str],
        divisors: Mapping[str, NDArray[np.float32] | None],
    ) -> str | None:
        if not any(f"{layer}.bias" in self._weights.elements for layer in layers):
            return None
        parts = []
        for layer in layers:
            bias, divisor = self._read(f"{layer}.bias"), divisors.get(layer)
            parts.append(bias if divisor is None else bias / divisor)
        self._tensor(f"{name}_bias", np.concatenate(parts))
        return f"{name}_bias"

    def _gamma(self, name: str, source: str, normed: str | None = None) -> None:
        gamma = self._read(source)
        if normed is not None and normed in self._smoothing:
            gamma = np.divide(gamma, self._smoothing[normed], dtype=np.float32)
        self._tensor(name, gamma)

    def _norm(self, value: str, gamma: str, out: str) -> None:
        self._node(
            "SimplifiedLayerNormalization",
            [value, gamma],
            [out],
            axis=-1,
            epsilon=self._shape.norm_eps,
            stash_type=1,
        )

    def _skip_norm(self, value: str, skip: str, gamma: str, out: str, total: str | None) -> None:
        outputs = [out] if total is None else [out, "", "", total]
        self._node(
            "SkipSimplifiedLayerNormalization",
            [value, skip, gamma],
            outputs,
            domain=CONTRIB_DOMAIN,
            epsilon=self._shape.norm_eps,
        )

    def _read(self, name: str) -> NDArray[np.float32]:
        values = self._weights.read(name)
        if not np.isfinite(values).all():
            raise ModelError(
                f"{name} holds numbers that are not finite: the checkpoint is damaged. Download it "
                "again."
            )
        self._on_read(values.nbytes)
        return values

    def _tensor(self, name: str, array: NDArray[np.generic]) -> None:
        self._initializers.append(self._data.add(name, array))

    def _node(
        self,
        op: str,
        inputs: list[str],
        outputs: list[str],
        *,
        domain: str = "",
        **attributes: float | str,
    ) -> None:
        node = helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes)
        self._nodes.append(node)
