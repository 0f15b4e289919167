"""ONNX Runtime sessions as this engine uses them, and what the installed runtime can do."""

import os
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import psutil


def session_options(threads: int | None) -> ort.SessionOptions:
    """Return options for one sequential stream of steps.

    Args:
        threads: Intra-op threads; None means one per physical core.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or default_threads()
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # Spinning workers make a step of the built-in model faster on two idle cores (9 ms against
    # 11 ms), slower on two busy ones (36 ms against 20 ms), and cost twice the CPU time whenever
    # steps are not back to back. An engine beside other work should not spin.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # session.set_denormal_as_zero stays off: it gains nothing here (measured) and would change the
    # floating-point mode of the thread that opens the session.
    return options


def default_threads() -> int:
    """Return the physical cores that this process may use, at least 1."""
    allowed = os.cpu_count() or 1
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS, which binds no process to cores
        allowed = len(process.cpu_affinity()) or allowed
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def open_session(graph: Path, threads: int | None) -> ort.InferenceSession:
    """Load a graph on the CPU; its external data is mapped, not read.

    Raises:
        Exception: what the runtime raises for a graph it cannot load.
    """
    return ort.InferenceSession(
        str(graph), session_options(threads), providers=["CPUExecutionProvider"]
    )


@cache
def has_query_seqlens() -> bool:
    """Return whether this runtime's GroupQueryAttention takes `query_seqlens`.

    Asked by running a small graph, since version numbers of custom builds and of the GPU package
    do not say.
    """
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415 - a build's library

    dim, room = 16, 4
    info = helper.make_tensor_value_info
    cache_dims = ["B", 1, "C", dim]
    table = np.ones((room, dim // 2), np.float32)
    node = helper.make_node(
        "GroupQueryAttention",
        ["qkv", "", "", "k", "v", "len", "total", "cos", "sin", *[""] * 7, "query_seqlens"],
        ["out", "present_k", "present_v"],
        domain="com.microsoft",
        num_heads=1,
        kv_num_heads=1,
        do_rotary=1,
    )
    graph = helper.make_graph(
        [node],
        "probe",
        [
            info("qkv", TensorProto.FLOAT, ["B", "S", 3 * dim]),
            info("k", TensorProto.FLOAT, cache_dims),
            info("v", TensorProto.FLOAT, cache_dims),
            info("len", TensorProto.INT32, ["B"]),
            info("total", TensorProto.INT32, []),
            info("query_seqlens", TensorProto.INT32, ["B"]),
        ],
        [
            info("out", TensorProto.FLOAT, None),
            info("present_k", TensorProto.FLOAT, cache_dims),
            info("present_v", TensorProto.FLOAT, cache_dims),
        ],
        [numpy_helper.from_array(table, "cos"), numpy_helper.from_array(table, "sin")],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    options = session_options(1)
    # A runtime without the input says so as an error; that is an answer, not news.
    options.log_severity_level = 4
    empty = np.zeros((1, 1, room, dim), np.float32)
    feeds = {
        "qkv": np.ones((1, 2, 3 * dim), np.float32),
        "k": empty,
        "v": empty,
        "len": np.array([0], np.int32),
        "total": np.array(room, np.int32),
        "query_seqlens": np.array([1], np.int32),
    }
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        session.run(None, feeds)
    except Exception:  # noqa: BLE001 - the runtime has its own exception types and no common base
        return False
    return True
