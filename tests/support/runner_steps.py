"""Sequences through a runner, step by step and without a thread of its own."""

from collections.abc import Callable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny_models import TINY

from cloud_engine.memory_plan import BLOCK_SIZE
from cloud_engine.packed_model import PackedModel
from cloud_engine.runner import Runner, RunnerOptions
from cloud_engine.sampling import draw
from engine_core.batch_model import compute
from engine_core.scheduler import Scheduler, Sequence
from engine_core.types import TokenDraw

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * BLOCK_SIZE
"""Of `tiny_models.TINY`: keys and values, layers, heads, head size, float32, tokens."""
SMALLEST = (128 // BLOCK_SIZE + 1) * BLOCK_BYTES
"""Room for one of its sequences at the longest, and the trash block."""
HOT = 1.5


def open_runner(model: Any, *, capture: Any = None, **options: Any) -> Runner:
    """Return a runner over a copy of a transformers model."""
    import copy

    return Runner(PackedModel(copy.deepcopy(model)), RunnerOptions(**options), capture=capture)


def plain_logits(model: Any, tokens: Numbers[int]) -> NDArray[np.float32]:
    """Return the logits `[len(tokens), vocab]` of a transformers model by itself."""
    import torch

    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([list(tokens)])).logits[0].numpy()
    return logits


@dataclass(eq=False)
class Run:
    """One sequence, how many tokens it is to generate, and the logits that came for it."""

    sequence: Sequence
    count: int
    prompt: int
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.sequence.tokens[self.prompt :]


class Steps:
    """Runs a runner's steps as the batch engine does.

    Where logits come to the host, the next token is drawn here just as a device draws.

    Args:
        runner: What computes.
    """

    def __init__(self, runner: Runner) -> None:
        sizes = runner.step_sizes
        self.runner = runner
        self.scheduler = Scheduler(
            runner.space,
            max_waiting=100,
            chunk=sizes.chunk,
            budget=sizes.budget,
            quiet_budget=sizes.quiet_budget,
        )
        self.sizes: list[list[int]] = []
        """Tokens of each row of each step."""
        self.failed: list[Run] = []
        self._runs: dict[Sequence, Run] = {}

    def add(
        self,
        prompt: Numbers[int],
        count: int = 1,
        *,
        draw: TokenDraw | None = None,
        salt: str = "",
    ) -> Run:
        """Add a sequence; without a draw its logits come to the host, and the likeliest follows."""
        sequence = Sequence(tokens=list(prompt), draw=draw, salt=salt)
        run = self._runs[sequence] = Run(sequence, count, len(prompt))
        self.scheduler.add(sequence)
        return run

    def step(self) -> bool:
        """Compute one step; return whether there was anything to compute."""
        rows = self.scheduler.plan()
        if not rows:
            return False
        self.sizes.append([len(row.tokens) for row in rows])
        choices, without = compute(self.runner, rows)
        self.scheduler.computed(row for row in rows if row.sequence not in without)
        for sequence in without:
            self.failed.append(self._runs[sequence])
            self.scheduler.leave(sequence, keep=False)
        for row, choice in choices:
            run = self._runs[row.sequence]
            if isinstance(choice, int):
                token = choice
            else:
                run.logits.append(choice.copy())
                token = _drawn(choice, row.sequence)
            self.scheduler.append(row.sequence, token)
            if len(run.generated) == run.count:
                self.scheduler.leave(row.sequence)
        return True

    def run(self) -> None:
        """Compute until nothing is left to do, and see that nobody holds a block then."""
        while self.step():
            pass
        assert not self.scheduler.waiting
        assert not self.runner.space.used_blocks


def _drawn(logits: NDArray[np.float32], sequence: Sequence) -> int:
    import torch

    if sequence.draw is None or not sequence.draw.temperature:
        return int(logits.argmax())
    seed = np.array([sequence.draw.seed], "<u8").view("<i4").reshape(1, 2)
    tokens = draw(
        torch.from_numpy(logits)[None],
        torch.tensor([sequence.draw.temperature]),
        torch.from_numpy(seed),
        torch.tensor([len(sequence.tokens)], dtype=torch.int32),
    )
    return int(tokens[0])


def assert_as_by_itself(model: Any, run: Run, tolerance: float = 1e-5) -> None:
    """Compare all logits that came for a sequence with the model's own.

    Args:
        model: The transformers model.
        run: A sequence without a draw.
        tolerance: Of the largest logit.
    """
    wanted = plain_logits(model, run.sequence.tokens)[run.prompt - 1 : -1]
    found = np.array(run.logits)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


def random_ids(count: int, seed: int = 3) -> list[int]:
    """Return so many token ids, the same ones every time."""
    return [int(x) for x in np.random.default_rng(seed).integers(0, TINY["vocab_size"], count)]


def three_runs(steps: Steps) -> list[Run]:
    """Add two sequences that a device can draw, and one whose logits come to the host."""
    return [
        steps.add(random_ids(30, 1), 60, draw=TokenDraw(0.0, 0)),
        steps.add(random_ids(37, 2), 60, draw=TokenDraw(HOT, 2**63 + 11)),
        steps.add(random_ids(21, 3), 60),
    ]


def three_generated(runner: Runner) -> list[list[int]]:
    """Return what these three get when nothing else is going on."""
    steps = Steps(runner)
    runs = three_runs(steps)
    steps.run()
    assert runs[0].logits == []
    return [run.generated for run in runs]


def limit_forward(runner: Runner, refuses: Callable[[Any], bool], error: Exception) -> list[int]:
    """Make the model raise for some inputs; return the sizes of the others, as they come."""
    model = runner._model._model
    forward, sizes = model.forward, []

    def limited(*, input_ids: Any, **rest: Any) -> Any:
        if refuses(input_ids):
            raise error
        sizes.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **rest)

    model.forward = limited
    return sizes
