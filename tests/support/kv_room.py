"""Room for keys and values in tests."""

from edge_engine.kv_budget import KvBudget


def room(context: int, slots: int = 1) -> KvBudget:
    """Return a budget in which these slots of a small model fit."""
    return KvBudget(memory=2**30, limit=2**30, context=context, slots=slots)
