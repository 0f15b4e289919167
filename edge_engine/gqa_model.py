"""Steps over an emitted graph: one sequence, keys and values appended in place."""

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_engine.manifest import GRAPH_FILE, Build
from edge_engine.session import open_session


class GqaModel:
    """A `StepModel` over one slot of key-value memory.

    Everything a step touches is allocated and bound once; a step fills the small arrays in place.
    Keys and values are zero pages until a token is written, so memory grows with use.

    Args:
        build: What to run.
        context: Tokens of room, at most the manifest's `max_position`.
        threads: Intra-op threads; None for one per physical core.
    """

    def __init__(
        self,
        build: Build,
        *,
        context: int,
        threads: int | None = None,
    ) -> None:
        manifest = build.manifest
        self.context_window = context
        self._ragged = manifest.ragged
        self._length = 0
        self._session = open_session(build.folder / GRAPH_FILE, threads)
        options = self._session.get_session_options()
        self.details: dict[str, str | int | float | bool] = {
            "provider": self._session.get_providers()[0],
            "precision": manifest.precision,
            "step_mode": "ragged" if manifest.ragged else "split",
            "graph": "gqa",
            "threads": options.intra_op_num_threads,
            "onnxruntime": ort.__version__,
        }
        self._vocab: int = self._session.get_outputs()[0].shape[1]
        # Declared as [B, kv_heads, C, head_dim] with the two numbers in place.
        self._caches = {
            past.name: np.zeros((1, past.shape[1], context, past.shape[3]), np.float32)
            for past in self._session.get_inputs()
            if past.name.startswith("past_")
        }
        self.kv_total_bytes = sum(cache.nbytes for cache in self._caches.values())
        self._ids = np.zeros(context, np.int64)
        self._seqlens = np.zeros(1, np.int32)
        self._total = np.array(context, np.int32)
        self._queries = np.zeros(1, np.int32)
        self._row = np.zeros(1, np.int64)
        self._logits: NDArray[np.float32] = np.zeros((1, self._vocab), np.float32)
        self._binding = self._session.io_binding()
        self._bound_tokens = 0
        self._bind()

    @property
    def kv_used_bytes(self) -> int:
        """Bytes of keys and values that hold tokens of the current sequence."""
        return self.kv_total_bytes * self._length // self.context_window

    def reset(self) -> None:
        """Forget the sequence."""
        self._length = 0

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens; return the logits `[vocab]` of the last one, valid until the next call.

        Raises:
            ValueError: no token, or more than the context window has room for.
        """
        self._row[0] = len(token_ids) - 1
        self._step(token_ids)
        last: NDArray[np.float32] = self._logits[0]
        return last

    def forward_all(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens; return the logits `[len(token_ids), vocab]` of every one of them.

        For measuring accuracy: it allocates the answer, which a serving step never does.
        """
        rows = np.arange(len(token_ids), dtype=np.int64)
        logits = np.empty((len(token_ids), self._vocab), np.float32)
        self._binding.bind_ortvalue_input("logit_rows", _shared(rows))
        self._binding.bind_ortvalue_output("logits", _shared(logits))
        try:
            self._step(token_ids)
        finally:
            self._bind_last_row()
        return logits

    def close(self) -> None:
        """Free the session and the caches."""
        del self._binding, self._session
        self._caches.clear()

    def _step(self, token_ids: Sequence[int]) -> None:
        count = len(token_ids)
        length = self._length + count
        if not 0 < count <= self.context_window - self._length:
            raise ValueError(
                f"{count} tokens do not fit: {self._length} of {self.context_window} are used"
            )
        self._ids[:count] = token_ids
        if count != self._bound_tokens:
            self._binding.bind_ortvalue_input("input_ids", _shared(self._ids[:count][None]))
            self._bound_tokens = count
        self._seqlens[0] = length - 1
        if self._ragged:
            self._queries[0] = count
        else:
            self._total[...] = length
        self._session.run_with_iobinding(self._binding)
        self._length = length

    def _bind(self) -> None:
        bind = self._binding.bind_ortvalue_input
        bind("seqlens_k", _shared(self._seqlens))
        bind("total_sequence_length", _shared(self._total))
        if self._ragged:
            bind("query_seqlens", _shared(self._queries))
        for name, cache in self._caches.items():
            value = _shared(cache)
            bind(name, value)
            # The same memory in and out is what makes GroupQueryAttention append in place.
            self._binding.bind_ortvalue_output(name.replace("past", "present"), value)
        self._bind_last_row()

    def _bind_last_row(self) -> None:
        self._binding.bind_ortvalue_input("logit_rows", _shared(self._row))
        self._binding.bind_ortvalue_output("logits", _shared(self._logits))


def _shared(array: NDArray[np.generic]) -> ort.OrtValue:
    """Wrap an array without copying it: later writes to it are what the next step sees."""
    return ort.OrtValue.ortvalue_from_numpy(array)
