"""What CUDA Graphs are, on a CPU: operations recorded once and run again on the same memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WARM_UPS = 2
# The last two are what `tolist` and `numpy`, and tensors made of Python's numbers, begin with.
_HOST_READS = ("item", "is_nonzero", "nonzero", "masked_select", "resolve_neg", "lift_fresh")


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any


class _Recorder(TorchDispatchMode):
    """Notes every operation with the tensors themselves; refuses what a capture refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = function.name().removeprefix("aten::").partition(".")[0]
        by_mask = name.startswith("index") and any(
            leaf.dtype == torch.bool for leaf in tree_leaves(args[1]) if torch.is_tensor(leaf)
        )
        if name in _HOST_READS or by_mask:
            raise RuntimeError(f"{name} is not permitted when the stream is capturing")
        results = function(*args, **(kwargs or {}))
        self.operations.append(_Operation(function, args, kwargs or {}, results))
        return results


class FakeCapture:
    """Records at the level of single operations, so that a replay knows nothing of Python.

    Like a CUDA graph it reads and writes the memory of capture time, keeps every number that was
    Python's, and leaves no other graph's outputs as they were.

    Args:
        failures: What the nth capture raises, from 0.
    """

    def __init__(self, failures: Mapping[int, Exception] | None = None) -> None:
        self._failures = failures or {}
        self._captures = 0
        self._outputs: list[Any] = []

    def capture(self, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self._captures += 1
        if self._captures - 1 in self._failures:
            raise self._failures[self._captures - 1]
        for _ in range(_WARM_UPS):
            step()
        with _Recorder() as recorder:
            outputs = step()
        self._outputs.append(outputs)

        def replay() -> None:
            with torch.inference_mode():
                for others in self._outputs:
                    for output in others:
                        output.fill_(float("nan") if output.is_floating_point() else -9)
                for operation in recorder.operations:
                    _run_again(operation)

        return outputs, replay


def _run_again(operation: _Operation) -> None:
    results = operation.function(*operation.args, **operation.kwargs)
    pairs = zip(tree_leaves(operation.results), tree_leaves(results), strict=True)
    for recorded, result in pairs:
        # A view, or the argument itself, is in its place already.
        if torch.is_tensor(recorded) and recorded.data_ptr() != result.data_ptr():
            recorded.copy_(result)
