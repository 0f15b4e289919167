"""What a runner does when memory is short, and what it tells of it."""

import gc
import weakref
from typing import Any

import psutil
import pytest
import torch
from fake_capture import FakeCapture
from runner_steps import (
    BLOCK_BYTES,
    Steps,
    assert_as_by_itself,
    limit_forward,
    open_runner,
    random_ids,
    three_generated,
    three_runs,
)
from tiny_models import TINY, random_model

from cloud_engine import runner as runner_module
from cloud_engine.device_memory import HostMemory
from cloud_engine.memory_plan import BLOCK_SIZE
from engine_core.errors import StepMemoryError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("you can't allocate memory")],
)
def test_a_step_that_memory_does_not_suffice_for_is_computed_in_parts(
    llama: Any, undisturbed: list[list[int]], error: RuntimeError
) -> None:
    runner = open_runner(llama)
    largest = limit_forward(runner, lambda tokens: tokens.shape[1] > 20, error)
    assert three_generated(runner) == undisturbed
    assert 10 < max(largest) <= 20


def test_a_sequence_that_memory_never_suffices_for_fails_alone(
    llama: Any, undisturbed: list[list[int]]
) -> None:
    runner = open_runner(llama)
    steps = Steps(runner)
    runs = three_runs(steps)
    seen = {token for run in runs for token in run.sequence.tokens}.union(*undisturbed)
    marker = min(set(range(97)) - seen)
    limit_forward(
        runner, lambda tokens: bool((tokens == marker).any()), torch.OutOfMemoryError("full")
    )
    doomed = steps.add([1, 2, 3] * 13 + [marker], 5)
    steps.run()
    assert steps.failed == [doomed]
    assert [run.generated for run in runs] == undisturbed
    again = steps.add([1, 2, 3] * 13 + [4], 5)
    steps.run()
    assert again.sequence.cached == 0  # nothing of what failed is trusted
    assert_as_by_itself(llama, again)


def test_other_errors_are_no_lack_of_memory(llama: Any) -> None:
    runner = open_runner(llama)
    limit_forward(runner, lambda _: True, RuntimeError("shapes differ"))
    steps = Steps(runner)
    steps.add([1, 2])
    with pytest.raises(RuntimeError, match="shapes differ"):
        steps.step()


def test_lack_of_memory_names_the_tokens_of_the_step(llama: Any) -> None:
    runner = open_runner(llama)
    limit_forward(runner, lambda _: True, torch.OutOfMemoryError("full"))
    steps = Steps(runner)
    steps.add([1, 2, 3])
    with pytest.raises(StepMemoryError, match="no memory for a step of 3 tokens"):
        runner.step(steps.scheduler.plan())


class FakeSharedMemory(HostMemory):
    """A device that others use as much as the test says."""

    def __init__(self) -> None:
        self.used = 0.0
        self.released: list[bool] = []

    def use(self) -> float:
        return self.used

    def release(self, *, always: bool) -> None:
        self.released.append(always)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> FakeSharedMemory:
    memory = FakeSharedMemory()
    monkeypatch.setattr(runner_module, "device_memory", lambda _: memory)
    return memory


def test_fewer_sequences_run_when_others_use_the_device(
    llama: Any, shared: FakeSharedMemory
) -> None:
    steps = Steps(open_runner(llama, max_running=4))
    runs = [steps.add(random_ids(5, seed), 10 + 10 * seed) for seed in range(6)]
    steps.step()
    assert steps.scheduler.running == 4
    shared.used = 0.7
    steps.step()
    assert steps.runner.details["running_limit"] == 2
    assert steps.scheduler.running == 4  # who runs is not sent away
    while len(runs[2].generated) < 30:
        steps.step()
    assert (steps.scheduler.running, steps.scheduler.waiting) == (1, 2)
    steps.step()
    assert steps.scheduler.running == 2
    shared.used = 0.95
    while len(runs[3].generated) < 40:
        steps.step()
    assert (steps.scheduler.running, steps.scheduler.waiting) == (1, 1)
    shared.used = 0.1
    steps.step()
    steps.step()
    assert steps.runner.details["running_limit"] == 4
    assert steps.scheduler.running == 2
    steps.run()
    for run in runs:
        assert_as_by_itself(llama, run)


def test_lack_of_memory_and_pressure_give_back_what_no_step_is_using(
    llama: Any, shared: FakeSharedMemory
) -> None:
    runner = open_runner(llama)
    for level in (0, 1, 2):
        runner.relieve(level)
    assert shared.released == [False, True, True]
    forward = runner._model._model.forward
    limit_forward(runner, lambda _: True, torch.OutOfMemoryError("full"))
    steps = Steps(runner)
    run = steps.add([1])
    steps.run()
    assert steps.failed == [run]
    assert shared.released[3:] == [True]
    runner._model._model.forward = forward


def test_pressure_drops_what_is_kept_and_gives_its_pages_back() -> None:
    # A block of one layer is a page.
    model = random_model("llama", **TINY | {"head_dim": 32})
    runner = open_runner(model)
    steps = Steps(runner)
    steps.add(random_ids(100), 2)
    steps.run()
    runner.relieve(1)
    kept = runner.memory()["kv"]
    assert runner.details["kv_blocks_cached"] == 6
    runner.relieve(2)
    assert runner.details["kv_blocks_cached"] == 0
    assert runner.memory()["kv"] == kept - 6 * runner.kv_token_bytes * BLOCK_SIZE
    anew = steps.add(random_ids(100), 2)
    steps.run()
    assert anew.sequence.cached == 0
    assert_as_by_itself(model, anew)


def test_memory_is_told_in_parts_that_add_up_to_what_is_resident(llama: Any) -> None:
    runner = open_runner(llama)
    steps = Steps(runner)
    steps.add(random_ids(100), 2)
    steps.run()
    runner.relieve(0)
    parts = runner.memory()
    assert set(parts) == {"python_and_libraries", "weights", "kv", "arena"}
    assert parts["weights"] == runner.details["weight_bytes"]
    assert parts["kv"] >= 102 * runner.kv_token_bytes
    assert sum(parts.values()) == pytest.approx(psutil.Process().memory_info().rss, rel=0.01)


def test_keys_and_values_take_what_the_operator_allows(llama: Any) -> None:
    runner = open_runner(llama, kv_memory=20 * BLOCK_BYTES + 5)
    assert runner.kv_token_bytes * BLOCK_SIZE == BLOCK_BYTES
    assert runner.kv_total_bytes == 20 * BLOCK_BYTES
    assert (runner.details["kv_blocks"], runner.details["kv_blocks_free"]) == (19, 19)


def test_a_closed_runner_leaves_neither_model_nor_blocks_behind(llama: Any) -> None:
    runner = open_runner(llama, capture=FakeCapture())
    gone = weakref.ref(runner._model._model), weakref.ref(runner._pool)
    runner.close()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
