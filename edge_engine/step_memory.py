"""Working memory of steps: ONNX Runtime's arena, with a limit and a way to give it back.

The limit makes an oversized step an exception instead of a visit from the kernel's OOM killer.

What the runtime packs into private memory at load counts against the limit, and once that is more
than the limit, the limit is void: the runtime subtracts one from the other as unsigned numbers
(`BFCArena::Extend` in bfc_arena.cc). Builds therefore store packed weights; see
`edge_engine.packing`.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnxruntime as ort

from engine_core.errors import StepMemoryError

DEFAULT_SHARE = 0.05
"""Of the memory that the process may take, as the limit where nobody gave one."""
DEFAULT_LEAST = 64 * 2**20
"""Bytes that the limit is at least where nobody gave one. A step of 128 tokens of the built-in
model takes 8 MiB; what a step takes grows with the widths of a model's layers."""

_CANNOT_ALLOCATE = ("smaller than requested bytes", "Failed to allocate memory")
"""By the limit, and by the system below it."""

# y = Identity(x), one float: the smallest step that there is.
_IDENTITY = (
    b'\x08\x08:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12'
    b"\x04\n\x02\x08\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x12"
)


class StepMemory:
    """An arena that the sessions opened with it share.

    Args:
        limit: Most bytes of the arena.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Regions of just the size that was asked for, so that all can go back.
        settings = {
            "max_mem": limit,
            "arena_extend_strategy": 1,
            "initial_chunk_size_bytes": -1,
            "max_dead_bytes_per_chunk": -1,
        }
        where = ort.OrtMemoryInfo(
            "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
        )
        # One per process: it takes the place of an earlier one for sessions opened from now on.
        ort.create_and_register_allocator(where, ort.OrtArenaCfg(settings))
        # Arenas are only ever shrunk at the end of a run.
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self.use_in(options)
        self._smallest = ort.InferenceSession(
            _IDENTITY, options, providers=["CPUExecutionProvider"]
        )
        self._shrink = ort.RunOptions()
        self._shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._run = ort.RunOptions()
        # A run without room is told by its exception, not on stderr.
        self._run.log_severity_level = 4

    def use_in(self, options: ort.SessionOptions) -> None:
        """Make a session allocate here. It must be opened before another `StepMemory` is made."""
        options.add_session_config_entry("session.use_env_allocators", "1")
        # Planned memory would gain no time (measured), double the arena, and keep a plan for each
        # of the thousands of shapes that runs can have.
        options.enable_mem_pattern = False

    def run(self, session: ort.InferenceSession, binding: ort.IOBinding) -> None:
        """Run a session that allocates here.

        Raises:
            StepMemoryError: it has no room, not even once all that is unused has been given back.
        """
        try:
            with no_room_told_apart():
                session.run_with_iobinding(binding, self._run)
        except StepMemoryError:
            # Runs of other shapes may have left regions that are too small for this one.
            self._run_smallest()
            with no_room_told_apart():
                session.run_with_iobinding(binding, self._run)

    def shrink(self) -> None:
        """Give back to the system what no run is using. Takes a few milliseconds."""
        self._run_smallest()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform != "win32" else None
        if trim is not None:  # glibc only; other allocators do it by themselves
            trim(0)

    def _run_smallest(self) -> None:
        with no_room_told_apart():
            self._smallest.run(None, {"x": np.zeros(1, np.float32)}, self._shrink)


def default_limit(memory: int) -> int:
    """Return the limit where nobody gave one.

    Args:
        memory: Bytes that the process may take in all.
    """
    return max(DEFAULT_LEAST, int(memory * DEFAULT_SHARE))


@contextmanager
def no_room_told_apart() -> Iterator[None]:
    """Raise StepMemoryError for what the runtime calls a failure like any other."""
    try:
        yield
    except MemoryError as error:
        raise StepMemoryError(str(error)) from None
    except Exception as error:  # of classes of the runtime's own, which differ between its calls
        if any(words in str(error) for words in _CANNOT_ALLOCATE):
            raise StepMemoryError(str(error)) from None
        raise
