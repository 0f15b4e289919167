"""Write a Llama-shaped decoder as one small ONNX graph around GroupQueryAttention.

Inputs (B sequences, S new tokens each, room for C tokens per sequence):

- `input_ids` int64 `[B, S]`
- `seqlens_k` int32 `[B]`: tokens in the cache after this step, minus one
- `total_sequence_length` int32 scalar: the largest length after this step; with `query_seqlens`
  any upper bound up to C will do
- `query_seqlens` int32 `[B]`: how many of the S tokens are real (graphs for runtimes that have it)
- `logit_rows` int64 `[R]`: flat indices into B*S; only these rows reach the vocabulary
- `past_key_i`, `past_value_i` float32 `[B, kv_heads, C, head_dim]`, bound to the same memory as
  `present_key_i`, `present_value_i`: the step appends in place

Output: `logits` float32 `[R, vocab]`.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_engine.arch import LlamaShape
from edge_engine.external_data import ExternalData
from edge_engine.manifest import DATA_FILE, GRAPH_FILE, Precision
from edge_engine.quantize import BITS, BLOCK, quantize_weight
from edge_engine.rope import cos_sin_tables
from edge_engine.weights import Weights

# Input 16 of GroupQueryAttention is query_seqlens; inputs 9 to 15 stay empty.
_QUERY_SEQLENS_INPUT = 16
_CONTRIB = "com.microsoft"
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
) -> None:
    """Write `model.onnx` and its data file into an existing folder.

    Args:
        weights: Where tensors come from; read one at a time, each once (a tied head twice).
        shape: The decoder's numbers.
        folder: Receives the two files.
        precision: `int8` for 8-bit blocks in every linear layer, `fp32` for parity checks.
        ragged: Whether the graph has the input `query_seqlens`.
        on_read: Called after each tensor with its float32 bytes.

    Raises:
        KeyError: a tensor that this shape needs is missing.
    """
    with ExternalData(folder, DATA_FILE) as data:
        emitter = _Emitter(
            weights, shape, data, precision=precision, ragged=ragged, on_read=on_read
        )
        model = emitter.model()
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
    ) -> None:
        self._weights = weights
        self._shape = shape
        self._data = data
        self._precision = precision
        self._ragged = ragged
        self._on_read = on_read
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        shape = self._shape
        self._tensor("rows_of_hidden", np.array([-1, shape.hidden], np.int64))
        self._tensor("rows_of_heads", np.array([-1, shape.heads * shape.head_dim], np.int64))
        cos, sin = cos_sin_tables(
            shape.rope_theta, shape.head_dim, shape.max_position, shape.rope_scaling
        )
        self._tensor("cos_cache", cos)
        self._tensor("sin_cache", sin)
        # float32 and mapped from the file: a step reads one row of it per token.
        self._tensor("embedding", self._read("model.embed_tokens.weight"))
        self._node("Gather", ["embedding", "input_ids"], ["residual_0"])
        self._gamma("norm_0", "model.layers.0.input_layernorm.weight")
        self._norm("residual_0", "norm_0", "normed_0")
        for layer in range(shape.layers):
            self._layer(layer)
        self._head(f"normed_{shape.layers}")
        graph = helper.make_graph(
            self._nodes, "decoder", self._inputs(), self._outputs(), self._initializers
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB, 1)],
            ir_version=_IR_VERSION,
            producer_name="tidegate",
        )

    def _layer(self, layer: int) -> None:
        shape = self._shape
        prefix = f"model.layers.{layer}."
        residual = f"residual_{layer}"
        attended = self._attention(layer, prefix, f"normed_{layer}")
        if layer == shape.layers - 1:
            # Nothing after the last attention looks at other tokens: drop rows nobody asked for.
            self._node("Reshape", [attended, "rows_of_heads"], ["last_heads"])
            self._node("Reshape", [residual, "rows_of_hidden"], ["last_residual"])
            self._node("Gather", ["last_heads", "logit_rows"], ["asked_heads"])
            self._node("Gather", ["last_residual", "logit_rows"], ["asked_residual"])
            attended, residual = "asked_heads", "asked_residual"
        out = self._linear(f"o_{layer}", attended, [prefix + "self_attn.o_proj"])
        self._gamma(f"mlp_norm_{layer}", prefix + "post_attention_layernorm.weight")
        self._skip_norm(
            out, residual, f"mlp_norm_{layer}", f"mlp_normed_{layer}", f"mlp_residual_{layer}"
        )
        gate_up = self._linear(
            f"gate_up_{layer}",
            f"mlp_normed_{layer}",
            [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"],
        )
        gate, up, silu, product = (f"{part}_{layer}" for part in ("gate", "up", "silu", "product"))
        self._node("Split", [gate_up], [gate, up], axis=-1, num_outputs=2)
        # x * sigmoid(1.0 * x) is SiLU, in one kernel.
        self._node("QuickGelu", [gate], [silu], domain=_CONTRIB, alpha=1.0)
        self._node("Mul", [silu, up], [product])
        down = self._linear(f"down_{layer}", product, [prefix + "mlp.down_proj"])
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

    def _attention(self, layer: int, prefix: str, normed: str) -> str:
        shape = self._shape
        projections = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        packed = self._linear(f"qkv_{layer}", normed, projections)
        query, key, value = packed, "", ""
        if shape.qk_norm:
            query, key, value = self._normed_heads(layer, prefix, packed)
        inputs = [
            query,
            key,
            value,
            f"past_key_{layer}",
            f"past_value_{layer}",
            "seqlens_k",
            "total_sequence_length",
            "cos_cache",
            "sin_cache",
        ]
        if self._ragged:
            inputs += [""] * (_QUERY_SEQLENS_INPUT - len(inputs)) + ["query_seqlens"]
        attended = f"attended_{layer}"
        self._node(
            "GroupQueryAttention",
            inputs,
            [attended, f"present_key_{layer}", f"present_value_{layer}"],
            domain=_CONTRIB,
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
            do_rotary=1,
            local_window_size=shape.windows[layer],
        )
        return attended

    def _normed_heads(self, layer: int, prefix: str, packed: str) -> tuple[str, str, str]:
        """Split packed QKV and normalise each query and key head (Qwen3)."""
        shape = self._shape
        widths = [shape.heads * shape.head_dim] + [shape.kv_heads * shape.head_dim] * 2
        parts = [f"{part}_{layer}" for part in ("query", "key", "value")]
        if layer == 0:
            self._tensor("qkv_widths", np.array(widths, np.int64))
            # 0 copies a dimension: [B, S, heads * head_dim] <-> [B, S, heads, head_dim]
            for part, width in (("query", widths[0]), ("key", widths[1])):
                heads = width // shape.head_dim
                self._tensor(f"{part}_heads", np.array([0, 0, heads, shape.head_dim], np.int64))
                self._tensor(f"{part}_flat", np.array([0, 0, width], np.int64))
        self._node("Split", [packed, "qkv_widths"], parts, axis=-1)
        flat = []
        for part, weight in (("query", "q_norm"), ("key", "k_norm")):
            name = f"{part}_{layer}"
            self._gamma(f"{name}_gamma", f"{prefix}self_attn.{weight}.weight")
            self._node("Reshape", [name, f"{part}_heads"], [f"{name}_heads"])
            self._norm(f"{name}_heads", f"{name}_gamma", f"{name}_normed")
            self._node("Reshape", [f"{name}_normed", f"{part}_flat"], [f"{name}_flat"])
            flat.append(f"{name}_flat")
        return flat[0], flat[1], parts[2]

    def _head(self, normed: str) -> None:
        tied = self._shape.tied or "lm_head.weight" not in self._weights.elements
        source = "model.embed_tokens" if tied else "lm_head"
        if self._precision == "int8":
            self._linear("logits", normed, [source])
            return
        table = "embedding"
        if not tied:
            table = "lm_head"
            self._tensor(table, self._read("lm_head.weight"))
        self._node("Gemm", [normed, table], ["logits"], transB=1)

    def _linear(self, name: str, value: str, layers: list[str]) -> str:
        """Emit one product with the weights of `layers` side by side; return its output."""
        weight = np.concatenate([self._read(f"{layer}.weight") for layer in layers])  # [N, K]
        bias = self._bias(name, layers, weight.shape[0])
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
        inputs = [value, f"{name}_weight", f"{name}_scales", f"{name}_zeros"]
        if bias is not None:
            inputs += ["", bias]
        self._node(
            "MatMulNBits",
            inputs,
            [name],
            domain=_CONTRIB,
            K=weight.shape[1],
            N=weight.shape[0],
            bits=BITS,
            block_size=BLOCK,
            # Without it the CPU kernel expands the weight to float32 in every call.
            accuracy_level=4,
        )
        return name

    def _bias(self, name: str, layers: list[str], outputs: int) -> str | None:
        names = [f"{layer}.bias" for layer in layers]
        if not self._weights.elements.keys() & set(names):
            return None
        values = np.concatenate([self._read(bias) for bias in names])
        if values.shape != (outputs,):
            raise KeyError(f"{name}.bias")
        self._tensor(f"{name}_bias", values)
        return f"{name}_bias"

    def _gamma(self, name: str, source: str) -> None:
        self._tensor(name, self._read(source))

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
            domain=_CONTRIB,
            epsilon=self._shape.norm_eps,
        )

    def _read(self, name: str) -> NDArray[np.float32]:
        values = self._weights.read(name)
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
        **attributes: float,
    ) -> None:
        node = helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes)
        self._nodes.append(node)

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        info = helper.make_tensor_value_info
        inputs = [
            info("input_ids", TensorProto.INT64, ["B", "S"]),
            info("seqlens_k", TensorProto.INT32, ["B"]),
            info("total_sequence_length", TensorProto.INT32, []),
            info("logit_rows", TensorProto.INT64, ["R"]),
        ]
        if self._ragged:
            inputs.append(info("query_seqlens", TensorProto.INT32, ["B"]))
        return inputs + self._caches("past")

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        logits = helper.make_tensor_value_info(
            "logits", TensorProto.FLOAT, ["R", self._shape.vocab]
        )
        return [logits, *self._caches("present")]

    def _caches(self, side: str) -> list[onnx.ValueInfoProto]:
        dims = ["B", self._shape.kv_heads, "C", self._shape.head_dim]
        return [
            helper.make_tensor_value_info(f"{side}_{kind}_{layer}", TensorProto.FLOAT, dims)
            for layer in range(self._shape.layers)
            for kind in ("key", "value")
        ]
