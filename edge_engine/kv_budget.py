"""From bytes to sequences: how many slots of which context fit into a budget for keys and values."""

from dataclasses import dataclass

from engine_core.byte_sizes import format_bytes
from engine_core.errors import ModelError

DEFAULT_CONTEXT = 2048
"""Tokens of one sequence where nobody asked for more."""
MOST_SLOTS = 8
"""Sequences side by side where nobody asked for another number."""
DEFAULT_SHARE = 0.25
"""Of the memory that this process may take, where nobody gave a budget. Memory is taken only as
tokens are written, so this is a cap, not a cost."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What may be taken for keys and values, and what is wanted of it; None leaves it to us.

    Args:
        memory: Bytes, or None for `DEFAULT_SHARE` of `limit`.
        limit: Bytes that this process may take in all.
        context: Tokens of one sequence, or None for the model's own limit or `DEFAULT_CONTEXT`,
            whichever is smaller.
        slots: Sequences side by side, or None for as many as fit, up to `MOST_SLOTS`.
    """

    memory: int | None
    limit: int
    context: int | None = None
    slots: int | None = None

    @property
    def total(self) -> int:
        """Bytes that there are."""
        return self.memory or int(self.limit * DEFAULT_SHARE)


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Slots of equal size, and what they take.

    `slack` are the places of each slot beyond its context that a step needs.
    """

    context: int
    slots: int
    slack: int
    token_bytes: int
    budget: int

    @property
    def total_bytes(self) -> int:
        """Bytes when every slot is full."""
        return self.token_bytes * (self.context + self.slack) * self.slots

    def __str__(self) -> str:
        """Return the arithmetic, for the log."""
        places = f"({self.context:,} + {self.slack})" if self.slack else f"{self.context:,}"
        slots = f"{self.slots} slots" if self.slots > 1 else "1 slot"
        return (
            f"kv: {self.token_bytes:,} B per token x {places} tokens x {slots} = "
            f"{format_bytes(self.total_bytes)} of a budget of {format_bytes(self.budget)}"
        )


def plan_kv(budget: KvBudget, *, token_bytes: int, longest: int, slack: int = 0) -> KvPlan:
    """Return the slots that fit.

    Args:
        budget: What there is and what is wanted.
        token_bytes: Keys and values of one token, in all layers.
        longest: The model's own limit of tokens.
        slack: Places that every slot has beyond its context.

    Raises:
        ModelError: the context is more than the model was made for, or what is asked for does not
            fit; the message has both numbers and what to change.
    """
    context = budget.context or min(longest, DEFAULT_CONTEXT)
    if context > longest:
        raise ModelError(
            f"a context of {context} tokens is more than this model was made for; give at most "
            f"{longest}."
        )
    slot_bytes = token_bytes * (context + slack)
    slots = budget.slots or max(1, min(MOST_SLOTS, budget.total // slot_bytes))
    plan = KvPlan(context, slots, slack, token_bytes, budget.total)
    if plan.total_bytes > plan.budget:
        raise ModelError(_does_not_fit(plan))
    return plan


def _does_not_fit(plan: KvPlan) -> str:
    many = plan.slots > 1
    # Rounded up, so that following the advice helps.
    need = f"{-(-plan.total_bytes // 2**20)} MiB"
    ways = [f"raise kv_memory to {need}"]
    tokens = plan.budget // (plan.slots * plan.token_bytes) - plan.slack
    if tokens > 0:
        ways.append(f"lower context to at most {tokens} tokens")
    if many:
        ways.append("take fewer slots")
    return (
        f"{f'{plan.slots} slots' if many else 'one slot'} of {plan.context} tokens would take "
        f"{need} for keys and values, more than the budget of {format_bytes(plan.budget)}; "
        f"{', or '.join(ways)}."
    )
