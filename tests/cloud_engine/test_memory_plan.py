"""Blocks of keys and values: as many as fit, and a clear word when not even one sequence does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_engine.memory_plan import (
    BLOCK_SIZE,
    MIB,
    RESERVE,
    blocks_for,
    device_budget,
    plan_blocks,
)
from engine_core.errors import ModelError


def test_budget_is_what_steps_and_graphs_leave_of_nine_tenths() -> None:
    budget = device_budget(free=100_000 * MIB, step_peak=2_000 * MIB, graph=400 * MIB)
    assert budget == (90_000 - 2_000 - 500) * MIB - RESERVE


def test_budget_is_never_below_nothing() -> None:
    assert device_budget(free=100 * MIB, step_peak=200 * MIB, graph=0) == 0


def test_blocks_are_no_more_than_the_sequences_could_fill() -> None:
    plan = plan_blocks(budget=10**12, block_bytes=MIB, context=None, longest=100, sequences=3)
    assert (plan.blocks, plan.context) == (3 * 7 + 1, 100)


def test_context_that_nobody_asked_for_shrinks_to_what_fits() -> None:
    plan = plan_blocks(budget=11 * MIB, block_bytes=MIB, context=None, longest=4096, sequences=4)
    assert (plan.blocks, plan.context) == (11, 160)


def test_context_that_was_asked_for_and_does_not_fit_is_refused_with_both_ways_out() -> None:
    with pytest.raises(
        ModelError, match=r"raise kv_memory to 33 MiB, or lower context to at most 160"
    ):
        plan_blocks(budget=11 * MIB, block_bytes=MIB, context=512, longest=4096, sequences=4)


def test_budget_without_a_single_block_is_refused() -> None:
    with pytest.raises(ModelError, match=r"raise kv_memory to 9 MiB\.$"):
        plan_blocks(budget=MIB, block_bytes=MIB, context=None, longest=128, sequences=4)


def test_context_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(ModelError, match="give at most 128"):
        plan_blocks(budget=2**30, block_bytes=MIB, context=129, longest=128, sequences=1)


def test_arithmetic_is_told() -> None:
    plan = plan_blocks(budget=512 * MIB, block_bytes=MIB, context=1024, longest=2048, sequences=2)
    assert str(plan) == (
        "kv: 129 blocks of 16 tokens x 1,048,576 B = 129 MiB of a budget of 512 MiB; "
        "sequences of up to 1,024 tokens"
    )


@given(
    budget=st.integers(0, 2**24),
    block_bytes=st.integers(1, 2**16),
    context=st.none() | st.integers(1, 4096),
    sequences=st.integers(1, 64),
)
def test_plan_fits_its_budget_and_one_whole_sequence(
    budget: int, block_bytes: int, context: int | None, sequences: int
) -> None:
    try:
        plan = plan_blocks(
            budget=budget,
            block_bytes=block_bytes,
            context=context,
            longest=4096,
            sequences=sequences,
        )
    except ModelError:
        return
    assert plan.total_bytes <= budget
    assert context is None or plan.context == context
    assert blocks_for(plan.context) <= plan.blocks - 1 <= sequences * blocks_for(plan.context)
    assert blocks_for(plan.context) * BLOCK_SIZE >= plan.context
