"""What goes into and out of an emitted graph.

A run computes T tokens of some of the sequences that have room in a cache. Everything but
attention treats a token like any other, so tokens lie packed in rows, without padding. For
attention they are spread over a table of B sequences and S places, and gathered back.

Inputs (R logits are asked for, and every sequence has room for C tokens):

- `input_ids` int64 `[T]`
- `attention_rows` int64 `[B, S]`: which row stands at each place of the table
- `packed_rows` int64 `[T]`: at which place, counted over the whole table, each token stands first
- `logit_rows` int64 `[R]`: only these rows reach the vocabulary; there may be none
- `seqlens_k` int32 `[B]`: tokens in the cache after the run, minus one
- `total_sequence_length` int32 scalar: the largest length after the run; with `query_seqlens`
  any upper bound up to C will do
- `query_seqlens` int32 `[B]`: how many of the S places are used, 0 for a sequence that is left
  alone (graphs for runtimes that have it)
- `past_key_i`, `past_value_i` float32 or int8 `[B, kv_heads, C, head_dim]`, bound to the same memory
  as `present_key_i`, `present_value_i`: the run appends in place

Output: `logits` float32 `[R, vocab]`.
"""

import onnx
from onnx import TensorProto, helper

from edge_engine.arch import LlamaShape
from edge_engine.manifest import KvPrecision

_KV_TYPES = {"float32": TensorProto.FLOAT, "int8": TensorProto.INT8}


def graph_inputs(shape: LlamaShape, *, ragged: bool, kv: KvPrecision) -> list[onnx.ValueInfoProto]:
    """Declare the inputs; `ragged` graphs have `query_seqlens`."""
    info = helper.make_tensor_value_info
    inputs = [
        info("input_ids", TensorProto.INT64, ["T"]),
        info("attention_rows", TensorProto.INT64, ["B", "S"]),
        info("packed_rows", TensorProto.INT64, ["T"]),
        info("logit_rows", TensorProto.INT64, ["R"]),
        info("seqlens_k", TensorProto.INT32, ["B"]),
        info("total_sequence_length", TensorProto.INT32, []),
    ]
    if ragged:
        inputs.append(info("query_seqlens", TensorProto.INT32, ["B"]))
    return inputs + _caches(shape, "past", kv)


def graph_outputs(shape: LlamaShape, *, kv: KvPrecision) -> list[onnx.ValueInfoProto]:
    """Declare the outputs, `logits` first."""
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["R", shape.vocab])
    return [logits, *_caches(shape, "present", kv)]


def _caches(shape: LlamaShape, side: str, kv: KvPrecision) -> list[onnx.ValueInfoProto]:
    dims = ["B", shape.kv_heads, "C", shape.head_dim]
    return [
        helper.make_tensor_value_info(f"{side}_{kind}_{layer}", _KV_TYPES[kv], dims)
        for layer in range(shape.layers)
        for kind in ("key", "value")
    ]
