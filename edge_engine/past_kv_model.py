"""Steps over an export of `edge_engine.optimum_export`: keys and values grow by concatenation.

Works for every decoder that optimum can export, and costs a copy of the cache in every step; the
graphs of our own emitter do not.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_engine.kv_budget import KvBudget, plan_kv
from edge_engine.manifest import DATA_FILE, GRAPH_FILE, Build
from edge_engine.memory_account import MemoryAccount
from edge_engine.session import open_session
from edge_engine.step_memory import DEFAULT_LEAST, StepMemory
from engine_core.errors import ModelError

_KNOWN_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids"})


class PastKvModel:
    """A `StepModel` over a graph with inputs `past_key_values.*` and outputs `present.*`.

    Args:
        build: What to run.
        budget: What there is for keys and values; there is one slot, whatever is wanted.
        threads: Intra-op threads; None for one per physical core.
        step_limit: Most bytes of working memory of a step, beside keys and values.

    Raises:
        ModelError: the graph wants an input that no text-only decoder has, or a sequence does not
            fit the budget or the model.
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
        self._length = 0
        # Keys and values are outputs of a step, and while it runs, the old ones are there as well.
        self._step_memory = StepMemory(step_limit + 2 * budget.total)
        self._account = MemoryAccount()
        self._session = open_session(build.folder / GRAPH_FILE, threads, self._step_memory)
        self._inputs = {node.name for node in self._session.get_inputs()} & _KNOWN_INPUTS
        self._empty: dict[str, NDArray[np.float32]] = {}
        for node in self._session.get_inputs():
            if node.name.startswith("past_key_values."):
                self._empty[node.name] = np.zeros(_empty_shape(node.shape), np.float32)
            elif node.name not in _KNOWN_INPUTS:
                raise ModelError(
                    f"{manifest.source}: its exported graph wants the input {node.name!r}, which "
                    "is not known here; serve this model with the cloud engine instead."
                )
        self._presents = [name.replace("past_key_values", "present") for name in self._empty]
        # An empty cache has a zero where the tokens go: its other dimensions are bytes per token.
        per_token = sum(4 * int(np.prod([n for n in a.shape if n])) for a in self._empty.values())
        self.kv_token_bytes = per_token
        plan = plan_kv(
            replace(budget, slots=1), token_bytes=per_token, longest=manifest.max_position
        )
        self.plan = plan
        self.context_window = plan.context
        self.details: dict[str, str | int | float | bool] = {
            "provider": self._session.get_providers()[0],
            "precision": manifest.precision,
            "step_mode": "single",
            "graph": "past_kv",
            "threads": self._session.get_session_options().intra_op_num_threads,
            "onnxruntime": ort.__version__,
        }
        self._past: dict[str, ort.OrtValue] = {}
        self.reset()
        # The first step brings code and weights into memory.
        self.forward((0,))
        self.reset()
        self._account.loaded(build.folder / DATA_FILE, 0)

    def memory(self) -> dict[str, int]:
        """Return where the process's bytes are; see `MemoryAccount.parts`."""
        return self._account.parts(self._length * self.kv_token_bytes)

    def reset(self) -> None:
        """Forget the sequence and give its keys and values back."""
        self._length = 0
        self._past = {
            name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self._empty.items()
        }
        self._step_memory.shrink()

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens; return the logits `[vocab]` of the last one.

        Raises:
            StepMemoryError: the step needs more working memory than the limit.
            ValueError: no token, or more than the context window has room for.
        """
        count = len(token_ids)
        length = self._length + count
        if not 0 < count <= self.context_window - self._length:
            raise ValueError(
                f"{count} tokens do not fit: {self._length} of {self.context_window} are used"
            )
        positions = np.arange(self._length, length, dtype=np.int64)
        small = {
            "input_ids": np.asarray(token_ids, np.int64),
            "attention_mask": np.ones(length, np.int64),
            "position_ids": positions,
        }
        binding = self._session.io_binding()
        for name in self._inputs:
            binding.bind_cpu_input(name, small[name][None])
        for name, value in self._past.items():
            binding.bind_ortvalue_input(name, value)
        # Outputs come back in the order of binding.
        for name in ("logits", *self._presents):
            binding.bind_output(name)
        self._step_memory.run(self._session, binding)
        logits, *presents = binding.get_outputs()
        self._past = dict(zip(self._empty, presents, strict=True))
        self._length = length
        last: NDArray[np.float32] = logits.numpy()[0, -1]
        return last

    def close(self) -> None:
        """Free the session and the cache."""
        self._past.clear()
        del self._session


def _empty_shape(declared: Sequence[int | str]) -> list[int]:
    """Return the shape of a cache without tokens: batch 1, other unknown dimensions 0."""
    return [1, *(n if isinstance(n, int) else 0 for n in declared[1:])]
