"""ONNX Runtime sessions as this engine uses them, and what the installed runtime can do."""

import os
from functools import cache
from pathlib import Path

import onnxruntime as ort
import psutil
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from edge_engine.step_memory import StepMemory, no_room_told_apart
from engine_core.machine_limits import cpu_limit

SPIN_MICROSECONDS = 10
"""How long a worker without work looks out for some before it goes to sleep."""


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
    # A step is hundreds of small products, and the gap between two of them is shorter than putting
    # a worker to sleep and waking it again. The built-in model, one token, two cores, ms of time
    # and of CPU time: without spinning 10.1 and 15.7, spinning for 10 us 6.4 and 12.5, for longer
    # the same; between steps 5 ms apart, 11.1 and 17.3, 7.7 and 15.0. On busy cores (8 sequences):
    # 43 without, 43 for 10 us, 52 for 50 us, 56 as long as the runtime would by itself.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    # session.set_denormal_as_zero stays off: it gains nothing here (measured) and would change the
    # floating-point mode of the thread that opens the session.
    return options


def default_threads() -> int:
    """Return the physical cores that this process may use, at least 1."""
    allowed = os.cpu_count() or 1
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS, which binds no process to cores
        allowed = len(process.cpu_affinity()) or allowed
    # A container may see all cores and have the time of a few; more threads would be throttled.
    allowed = min(allowed, cpu_limit() or allowed)
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def open_session(
    graph: Path, threads: int | None, memory: StepMemory | None = None
) -> ort.InferenceSession:
    """Load a graph on the CPU; its external data is mapped, not read.

    Args:
        graph: Its file.
        threads: Intra-op threads; None means one per physical core.
        memory: Where its runs allocate; None for an arena of its own, without a limit.

    Raises:
        StepMemoryError: what the graph keeps of its own does not fit `memory`.
        Exception: what the runtime raises for a graph it cannot load.
    """
    options = session_options(threads)
    if memory is not None:
        memory.use_in(options)
    with no_room_told_apart():
        return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


@cache
def has_query_seqlens() -> bool:
    """Return whether this runtime's GroupQueryAttention takes `query_seqlens`.

    Read from the operator's own schema, since version numbers of custom builds and of the GPU
    package do not say.
    """
    return _attention_takes("query_seqlens")


@cache
def has_int8_kv() -> bool:
    """Return whether this runtime's GroupQueryAttention keeps int8 keys and values on the CPU.

    Its schema and its CPU kernel learned that together, in 1.25.
    """
    return _attention_takes("k_scale")


def _attention_takes(name: str) -> bool:
    return any(
        schema.name == "GroupQueryAttention" and any(value.name == name for value in schema.inputs)
        for schema in get_all_operator_schema()
    )
