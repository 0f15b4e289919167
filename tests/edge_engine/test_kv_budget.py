"""From bytes to slots, and what does not fit."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_engine.kv_budget import DEFAULT_CONTEXT, MOST_SLOTS, KvBudget, plan_kv
from engine_core.byte_sizes import parse_bytes
from engine_core.errors import ModelError

MIB = 2**20
TOKEN = 46_080  # the built-in model's: 30 layers x 2 x 3 heads x 64 x 4 bytes

budgets = st.builds(
    KvBudget,
    memory=st.none() | st.integers(1, 2**40),
    limit=st.integers(1, 2**42),
    context=st.none() | st.integers(1, 200_000),
    slots=st.none() | st.integers(1, 256),
)


def test_the_arithmetic_is_a_line() -> None:
    plan = plan_kv(KvBudget(768 * MIB, 0), token_bytes=TOKEN, longest=8192, slack=1)
    assert str(plan) == (
        "kv: 46,080 B per token x (2,048 + 1) tokens x 8 slots = 720 MiB of a budget of 768 MiB"
    )
    without = plan_kv(KvBudget(96 * MIB, 0, slots=1), token_bytes=TOKEN, longest=8192)
    assert str(without).endswith("x 2,048 tokens x 1 slot = 90 MiB of a budget of 96 MiB")


def test_without_a_budget_a_quarter_of_the_memory_is_one() -> None:
    plan = plan_kv(KvBudget(None, 2 * 2**30), token_bytes=TOKEN, longest=8192)
    assert plan.budget == 2**29
    assert plan.slots == 5


def test_a_short_model_gets_its_own_context() -> None:
    assert plan_kv(KvBudget(MIB, 0), token_bytes=1, longest=100).context == 100


def test_more_context_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(ModelError, match=r"context of 4096 tokens.*at most 128"):
        plan_kv(KvBudget(MIB, 0, context=4096), token_bytes=1, longest=128)


def test_what_does_not_fit_is_refused_with_both_numbers_and_the_ways_out() -> None:
    with pytest.raises(ModelError) as caught:
        plan_kv(KvBudget(64 * MIB, 0, context=2048), token_bytes=TOKEN, longest=8192, slack=1)
    assert str(caught.value) == (
        "one slot of 2048 tokens would take 91 MiB for keys and values, more than the budget of "
        "64 MiB; raise kv_memory to 91 MiB, or lower context to at most 1455 tokens."
    )
    with pytest.raises(ModelError, match=r"16 slots .* 1440 MiB .*, or take fewer slots"):
        plan_kv(KvBudget(768 * MIB, 0, slots=16), token_bytes=TOKEN, longest=8192)
    with pytest.raises(ModelError, match=r"raise kv_memory to 90 MiB\.$"):
        plan_kv(KvBudget(10, 0), token_bytes=TOKEN, longest=8192)


@given(budgets, st.integers(1, 2**20), st.integers(1, 200_000), st.integers(0, 4))
def test_a_plan_never_takes_more_than_the_budget_and_all_that_is_asked_for(
    budget: KvBudget, token_bytes: int, longest: int, slack: int
) -> None:
    try:
        plan = plan_kv(budget, token_bytes=token_bytes, longest=longest, slack=slack)
    except ModelError:
        return
    assert plan.total_bytes <= plan.budget
    assert plan.budget == (budget.memory or budget.limit // 4)
    assert plan.context <= longest
    assert plan.context == (budget.context or min(longest, DEFAULT_CONTEXT))
    if budget.slots is not None:
        assert plan.slots == budget.slots
    else:
        one_more = token_bytes * (plan.context + slack) * (plan.slots + 1)
        assert plan.slots == MOST_SLOTS or one_more > plan.budget


@given(budgets, st.integers(1, 2**20), st.integers(1, 200_000), st.integers(0, 4))
def test_what_a_refusal_offers_fits(
    budget: KvBudget, token_bytes: int, longest: int, slack: int
) -> None:
    model = {"token_bytes": token_bytes, "longest": longest, "slack": slack}
    try:
        plan_kv(budget, **model)
    except ModelError as error:
        if memory := re.search(r"raise kv_memory to (\d+ MiB)", str(error)):
            plan_kv(replace(budget, memory=parse_bytes(memory[1])), **model)
        if context := re.search(r"lower context to at most (\d+)", str(error)):
            plan_kv(replace(budget, context=int(context[1])), **model)
