"""Steps as graphs: one for each size, checked against the eager step before it serves anybody."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from cloud_engine.step_inputs import InputRow, StepInputs

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)
"""Sizes of graphs in tokens. Steps of 8 up to 64, where sequences that generate make up the step:
in NVIDIA/TensorRT-LLM#13393 such steps were up to 1.3 times as fast as powers of two. Above 256 a
step computes for longer than it takes to launch it."""

_TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.06}
"""Of an output's largest value. A step with padding multiplies matrices of another shape, for which
the libraries add in another order: that is worth some units of the last place, 2**-23, 2**-11 and
2**-8, in each layer. Inputs that did not reach the graph are worth the whole value."""

Outputs = TypeVar("Outputs", bound=tuple[torch.Tensor, ...])

_log = logging.getLogger("tidegate.engine")


class Capture(Protocol):
    """What records a step, such as `cuda_capture.CudaCapture`."""

    def capture(self, step: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        """Return a step's outputs, and what computes them anew from the same memory.

        The outputs are valid until another step that was captured here runs. May raise whatever
        the device or the model raises; what was captured before stays usable.
        """
        ...


@dataclass(slots=True)
class _Graph(Generic[Outputs]):
    outputs: Outputs
    replay: Callable[[], None]
    hits: int = 0


class StepGraphs(Generic[Outputs]):
    """Graphs of steps of several sizes; used by one thread, `stats` by any.

    Args:
        inputs: What `forward` reads.
        forward: Computes the first tokens of `inputs`, as many as it is given; the outputs have
            a row for each row of the views. All that varies between steps of one size, it reads
            from tensors whose memory stays where it is.
        off: Why there are no graphs, for stats, until `capture_all` makes some.
    """

    def __init__(
        self, inputs: StepInputs, forward: Callable[[int], Outputs], *, off: str = "not captured"
    ) -> None:
        self._inputs = inputs
        self._forward = forward
        self._off = off
        self._graphs: dict[int, _Graph[Outputs]] = {}
        self._sizes: list[int] = []
        self._padded_tokens = 0
        self._eager_steps = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of the graphs that serve, ascending; none if all steps are eager."""
        return tuple(self._sizes)

    def capture_all(
        self,
        sizes: Sequence[int],
        capture: Capture,
        sample: Callable[[int], Sequence[InputRow]],
    ) -> None:
        """Capture a graph for each size and check it; those that fail are left out, and logged.

        Args:
            sizes: In tokens.
            capture: What records the steps.
            sample: Returns random rows of so many tokens in all, other ones each time, in places
                and blocks that nobody uses. For the check to see all inputs they have pasts, with
                keys and values in them that are not zero, and want tokens: some the likeliest,
                and some drawn so hot that the seed decides.
        """
        for size in sorted(sizes, reverse=True):
            try:
                self._graphs[size] = self._captured(size, capture, sample)
            except Exception as error:  # noqa: BLE001 - whatever it is, the step works without
                self._off = f"{type(error).__name__}: {error}"
                _log.warning("no graph for steps of %d tokens: %s", size, self._off)
        self._sizes = sorted(self._graphs)

    def run(self, rows: Sequence[InputRow]) -> Outputs | None:
        """Compute a step in the smallest graph that it fits into.

        Returns:
            Outputs, valid until the next run, with the rows of padding behind those that want
            logits; None if there is no such graph, so that the caller computes the step eagerly.
        """
        tokens = sum(len(row.tokens) for row in rows)
        index = bisect_left(self._sizes, tokens)
        if index == len(self._sizes):
            self._eager_steps += 1
            return None
        size = self._sizes[index]
        graph = self._graphs[size]
        self._inputs.fill(rows, size)
        graph.replay()
        graph.hits += 1
        self._padded_tokens += size - tokens
        return graph.outputs

    def stats(self) -> dict[str, str | int]:
        """Return whether there are graphs, of which sizes, and what became of the steps."""
        return {
            "graphs": "on" if self._sizes else f"off: {self._off}",
            "graph_buckets": " ".join(map(str, self._sizes)),
            **{f"graph_hits_{size}": self._graphs[size].hits for size in self._sizes},
            "graph_padded_tokens_total": self._padded_tokens,
            "eager_steps_total": self._eager_steps,
        }

    def _captured(
        self, size: int, capture: Capture, sample: Callable[[int], Sequence[InputRow]]
    ) -> _Graph[Outputs]:
        self._inputs.fill(sample(size), size)
        graph = _Graph(*capture.capture(partial(self._forward, size)))
        self._check(size, graph, sample((size + 1) // 2))
        return graph

    def _check(self, size: int, graph: _Graph[Outputs], rows: Sequence[InputRow]) -> None:
        """Compare a graph with the eager step, on inputs that were not there at its capture.

        Raises:
            GraphMismatchError: they differ.
        """
        # Without padding it is seen what padding does to its company, and with it the same kernels
        # run as in the graph, so that all is equal down to the tokens.
        tokens = sum(len(row.tokens) for row in rows)
        self._inputs.fill(rows, tokens)
        alone = [output.clone() for output in self._forward(tokens)]
        self._inputs.fill(rows, size)
        padded = [output.clone() for output in self._forward(size)]
        graph.replay()
        wanted = sum(row.wants_logits for row in rows)
        for replayed, same, other in zip(graph.outputs, padded, alone, strict=True):
            if not _agree(replayed[:wanted], same[:wanted]):
                raise GraphMismatchError("it computes something else than the eager step")
            if replayed.is_floating_point() and not _agree(replayed[:wanted], other[:wanted]):
                raise GraphMismatchError("padding changes what it computes")


class GraphMismatchError(Exception):
    """A graph's outputs are not those of the eager step."""


def bucket_sizes(most_tokens: int) -> tuple[int, ...]:
    """Return the sizes of graphs for steps of up to so many tokens, at least 1; ascending.

    The largest step has a graph of its own size, unless it is beyond all of them.
    """
    largest = min(most_tokens, BUCKETS[-1])
    return (*(size for size in BUCKETS if size < largest), largest)


def _agree(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if not wanted.is_floating_point():
        return bool(torch.equal(found, wanted))
    off = (found - wanted).abs().max()
    return bool(off <= _TOLERANCES[wanted.dtype] * wanted.abs().max())  # not if it is no number
