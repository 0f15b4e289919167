"""Steps over an emitted graph: slots of keys and values, appended to in place.

A step is one run for the sequences that compute one token each, and one for every longer chunk of
a prompt. Everything in one run would read the weights once less, but attention would have to pad
every sequence to the longest chunk; measured on the built-in model, the two come out even.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import groupby
from math import prod

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_engine.kv_budget import KvBudget, plan_kv
from edge_engine.manifest import DATA_FILE, GRAPH_FILE, Build
from edge_engine.memory_account import MemoryAccount
from edge_engine.run_inputs import SLACK, Chunk, Row, RunInputs, RunShape
from edge_engine.session import open_session
from edge_engine.slots import SlotSpace
from edge_engine.step_memory import DEFAULT_LEAST, StepMemory
from engine_core.batch_model import StepSizes
from engine_core.kv_memory import KvMemory

_KEPT_SHAPES = 32
"""Shapes of runs whose inputs are kept bound. Binding anew takes a third of a millisecond."""
STEP_SIZES = StepSizes(chunk=32, budget=64, quiet_budget=64)
"""A newcomer waits for the step that is under way, even one that nobody else waits for. On the
built-in model and two cores 64 tokens take 45 ms and 128 take 82, a tenth less for each token."""
_LOOK_SECONDS = 0.5
"""Between two counts of the resident pages of keys and values: of 4 GiB, one takes 3 ms."""


class Runner:
    """A `BatchModel` over an emitted graph.

    Everything a run touches is allocated and bound once for its shape; a run fills the small
    inputs in place. Keys and values are zero pages until a token is written, so memory grows with
    use.

    Args:
        build: What to run.
        budget: What there is for keys and values, and what is wanted of it.
        threads: Intra-op threads; None for one per physical core.
        step_limit: Most bytes of working memory of a run.

    Raises:
        ModelError: the slots do not fit the budget, or the model.
    """

    def __init__(
        self,
        build: Build,
        budget: KvBudget,
        *,
        threads: int | None = None,
        step_limit: int = DEFAULT_LEAST,
    ) -> None:
        manifest = build.manifest
        self._step_memory = StepMemory(step_limit)
        # What reading the tokenizer has left behind is nobody's.
        self._step_memory.shrink()
        self._account = MemoryAccount()
        self._ragged = manifest.ragged
        with _attention_of_one_kind(ragged=manifest.ragged):
            self._session = open_session(build.folder / GRAPH_FILE, threads, self._step_memory)
        # Declared as [B, kv_heads, C, head_dim] with the two numbers in place.
        pasts = {
            node.name: (node.shape[1], node.shape[3])
            for node in self._session.get_inputs()
            if node.name.startswith("past_")
        }
        kv = np.dtype(manifest.kv)
        self._kv_precision = manifest.kv
        self.kv_token_bytes = sum(kv.itemsize * heads * dim for heads, dim in pasts.values())
        plan = plan_kv(
            budget, token_bytes=self.kv_token_bytes, longest=manifest.max_position, slack=SLACK
        )
        self.plan = plan
        self.context_window = plan.context
        self.step_sizes = STEP_SIZES
        # Over int8, attention with one query and with several are the same to the last bit.
        exact = manifest.ragged or manifest.kv == "int8"
        self.space = SlotSpace(plan.slots, keeps_generated=exact)
        self.kv_total_bytes = plan.total_bytes
        self._capacity = plan.context + SLACK
        shapes = {
            name: (plan.slots, heads, self._capacity, dim) for name, (heads, dim) in pasts.items()
        }
        self._kv = KvMemory(sum(KvMemory.room_for(kv.itemsize * prod(s)) for s in shapes.values()))
        self._caches = {name: self._kv.array(shape, kv) for name, shape in shapes.items()}
        self._kv_resident = 0
        self._looked = 0.0
        # How far each slot was ever written since it began anew.
        self._ends = [0] * plan.slots
        vocab: int = self._session.get_outputs()[0].shape[1]
        self._logits: NDArray[np.float32] = np.zeros((plan.slots, vocab), np.float32)
        self._bound = lru_cache(_KEPT_SHAPES)(self._bind)
        options = self._session.get_session_options()
        self.details: dict[str, str | int | float | bool] = {
            "provider": self._session.get_providers()[0],
            "precision": manifest.precision,
            "kv": manifest.kv,
            "step_mode": "ragged" if manifest.ragged else "split",
            "graph": "gqa",
            "threads": options.intra_op_num_threads,
            "slots": plan.slots,
            "onnxruntime": ort.__version__,
        }
        # The first run brings code and weights into memory.
        self.step([Chunk(0, 0, [0], wants_logits=True)])
        self.relieve(0)
        self._account.loaded(build.folder / DATA_FILE, self._kv_resident)

    def memory(self) -> dict[str, int]:
        """Return where the process's bytes are; see `MemoryAccount.parts`."""
        return self._account.parts(self._kv_resident)

    def step(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Compute tokens; return the logits of the rows that want them, `[rows, vocab]`.

        The array is used again by the next step. A step that raises has changed nothing before the
        `begin` of any row.

        Args:
            rows: At most one for each slot.

        Raises:
            StepMemoryError: a run needs more working memory than the limit.
            ValueError: a row without tokens, with more than its slot has room for, or with a gap
                between what its slot holds and its begin.
        """
        for row in rows:
            self._check(row)
        done = 0
        for run in self._runs(rows):
            logits = self._logits[done : done + sum(row.wants_logits for row in run)]
            self._run(run, logits)
            done += len(logits)
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._look()
        return self._logits[:done]

    def all_logits(self, token_ids: Sequence[int], *, chunk: int = 128) -> NDArray[np.float32]:
        """Return the logits `[len(token_ids), vocab]` of every token of a text, in the first slot.

        For measuring accuracy: it allocates the answer, which a step never does.

        Args:
            token_ids: A text that fits the context window.
            chunk: Tokens of one run.
        """
        logits = np.empty((len(token_ids), self._logits.shape[1]), np.float32)
        for begin in range(0, len(token_ids), chunk):
            row = Chunk(0, begin, token_ids[begin : begin + chunk])
            self._check(row)
            self._run([row], logits[begin : begin + chunk])
        return logits

    def relieve(self, level: int) -> None:
        """Give memory back; see `engine_core.types.Engine.pressure`."""
        if level >= 2:
            for slot in self.space.forget():
                self._ends[slot] = 0
                for cache in self._caches.values():
                    self._kv.release(cache[slot])
        self._step_memory.shrink()
        self._look()

    def close(self) -> None:
        """Free the session and the caches."""
        self._bound.cache_clear()
        self._caches.clear()
        del self._session, self._kv

    def _look(self) -> None:
        self._kv_resident = self._kv.resident_bytes()
        self._looked = time.monotonic()

    def _check(self, row: Row) -> None:
        end = row.begin + len(row.tokens)
        if not row.begin < end <= self.context_window:
            raise ValueError(
                f"{len(row.tokens)} tokens do not fit: {row.begin} of {self.context_window} are "
                "used"
            )
        if row.begin > self._ends[row.place]:
            raise ValueError(
                f"slot {row.place} holds {self._ends[row.place]} tokens, not {row.begin}"
            )

    def _runs(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Cut a step into runs: neighbours that may share one do, the others are alone."""
        for shared, group in groupby(rows, self._shares_run):
            if shared:
                yield list(group)
            else:
                yield from ([row] for row in group)

    def _shares_run(self, row: Row) -> bool:
        return len(row.tokens) == 1 if self._ragged else row.generated

    def _run(self, rows: list[Row], logits: NDArray[np.float32]) -> None:
        shape = RunShape.of(rows, ragged=self._ragged, logits=len(logits))
        inputs, binding = self._bound(shape)
        inputs.fill(rows, self._ends[shape.first : shape.first + shape.slots])
        binding.bind_ortvalue_output("logits", _shared(logits))
        for row in rows:
            self._ends[row.place] = row.begin + shape.tokens
        self._step_memory.run(self._session, binding)

    def _bind(self, shape: RunShape) -> tuple[RunInputs, ort.IOBinding]:
        inputs = RunInputs(
            shape, capacity=self._capacity, ragged=self._ragged, kv=self._kv_precision
        )
        binding = self._session.io_binding()
        for name, array in inputs.arrays.items():
            binding.bind_ortvalue_input(name, _shared(array))
        for name, cache in self._caches.items():
            value = _shared(cache[shape.first : shape.first + shape.slots])
            binding.bind_ortvalue_input(name, value)
            # The same memory in and out is what makes GroupQueryAttention append in place.
            binding.bind_ortvalue_output(name.replace("past", "present"), value)
        return inputs, binding


@contextmanager
def _attention_of_one_kind(*, ragged: bool) -> Iterator[None]:
    """Keep attention with one query from being cut differently in company, where it is used.

    Its tiled kernel spreads one long sequence over many threads, but several do not get cut that
    way. ONNX Runtime reads this variable when it makes the kernels of a session.
    """
    if ragged:
        yield
        return
    name = "ORT_GQA_DISABLE_FLASH_ATTENTION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _shared(array: NDArray[np.generic]) -> ort.OrtValue:
    """Wrap an array without copying it: later writes to it are what the next run sees."""
    return ort.OrtValue.ortvalue_from_numpy(array)
