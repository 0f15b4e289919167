"""A model that holds one sequence, behind the interface of those that hold many."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine_core.scheduler import Scheduler
from engine_core.scheduler import Sequence as Scheduled
from engine_core.single_sequence import SingleSequenceModel


class FakeStepModel:
    context_window = 20
    kv_token_bytes = 10
    details: dict[str, str | int | float | bool] = {"kind": "fake"}  # noqa: RUF012

    def __init__(self) -> None:
        self.held: list[int] = []
        self.closed = False

    def reset(self) -> None:
        self.held.clear()

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        self.held.extend(token_ids)
        return np.full(3, len(self.held), np.float32)

    def memory(self) -> dict[str, int]:
        return {"kv": len(self.held) * 10}

    def close(self) -> None:
        self.closed = True


def test_one_sequence_after_the_other_each_from_its_beginning() -> None:
    inner = FakeStepModel()
    model = SingleSequenceModel(inner)
    scheduler = Scheduler(model.space, max_waiting=5, chunk=4, budget=4)
    for length in (6, 3):
        scheduler.add(Scheduled(tokens=list(range(length))))
    seen = []
    while rows := scheduler.plan():
        logits = model.step(rows)
        scheduler.computed(rows)
        (row,) = rows
        assert logits.shape == ((1, 3) if row.wants_logits else (0, 3))
        if row.wants_logits:
            seen.append(list(inner.held))
            scheduler.leave(row.sequence)
    scheduler.computed([])
    assert seen == [[0, 1, 2, 3, 4, 5], [0, 1, 2]]


def test_keys_and_values_of_an_ended_sequence_are_freed_on_request() -> None:
    inner = FakeStepModel()
    model = SingleSequenceModel(inner)
    scheduler = Scheduler(model.space, max_waiting=5, chunk=4, budget=4)
    asked = Scheduled(tokens=[1, 2])
    scheduler.add(asked)
    rows = scheduler.plan()
    model.step(rows)
    scheduler.computed(rows)
    model.relieve(4)
    assert inner.held == [1, 2]
    scheduler.leave(asked)
    model.relieve(0)
    assert inner.held == []


def test_the_model_says_what_it_is() -> None:
    model = SingleSequenceModel(FakeStepModel())
    assert (model.context_window, model.kv_total_bytes, model.kv_token_bytes) == (20, 200, 10)
    assert (model.details, model.memory()) == ({"kind": "fake"}, {"kv": 0})
