"""From a build folder to a model that steps."""

import logging

from edge_engine.kv_budget import KvBudget, KvPlan
from edge_engine.manifest import Build
from edge_engine.past_kv_model import PastKvModel
from edge_engine.runner import Runner
from edge_engine.step_memory import default_limit
from engine_core.batch_model import BatchModel
from engine_core.byte_sizes import format_bytes
from engine_core.errors import ModelError, StepMemoryError
from engine_core.machine_limits import memory_limit
from engine_core.memory_size import STEP_LEAST
from engine_core.single_sequence import SingleSequenceModel

_log = logging.getLogger("tidegate.engine")


def open_model(
    build: Build,
    *,
    context: int | None = None,
    slots: int | None = None,
    kv_memory: int | None = None,
    step_memory: int | None = None,
    threads: int | None = None,
) -> BatchModel:
    """Load a build to serve it, and log how the memory for keys and values is cut up.

    Args:
        build: What `ensure_build` returned.
        context: Tokens of one sequence; None for the model's own limit or `DEFAULT_CONTEXT`,
            whichever is smaller.
        slots: Sequences side by side; None for as many as fit, up to `MOST_SLOTS`. An exported
            graph has room for one, whatever is asked.
        kv_memory: Most bytes of keys and values; None for a share of what the process may take.
        step_memory: Most bytes of working memory of a step; the same.
        threads: Intra-op threads; None for one per physical core.

    Raises:
        ModelError: `context` is more than the model was made for, what is asked for does not fit
            `kv_memory`, or a single token does not fit `step_memory`.
    """
    memory = memory_limit()
    budget = KvBudget(kv_memory, memory, context, slots)
    limit = step_memory or default_limit(memory)
    try:
        model, plan = load_model(build, budget, threads=threads, step_limit=limit)
    except StepMemoryError:
        raise ModelError(_too_little(build, budget, limit)) from None
    _log.info("%s", plan)
    return model


def load_model(
    build: Build, budget: KvBudget, *, step_limit: int, threads: int | None = None
) -> tuple[BatchModel, KvPlan]:
    """Load a build and compute its first token; return it and how its memory is cut up.

    Args:
        build: What to run.
        budget: What there is for keys and values, and what is wanted of it.
        step_limit: Most bytes of working memory of a step.
        threads: Intra-op threads; None for one per physical core.

    Raises:
        ModelError: what is wanted does not fit the budget or the model.
        StepMemoryError: the first token does not fit `step_limit`.
    """
    if build.manifest.graph == "gqa":
        runner = Runner(build, budget, threads=threads, step_limit=step_limit)
        return runner, runner.plan
    exported = PastKvModel(build, budget, threads=threads, step_limit=step_limit)
    return SingleSequenceModel(exported), exported.plan


def _too_little(build: Build, budget: KvBudget, limit: int) -> str:
    """Say that one token does not fit, and what it needs: found by trying twice as much."""
    beginning = f"step_memory of {format_bytes(limit)} is too little for one token of {build.manifest.source}"
    need = STEP_LEAST
    while need < budget.limit:
        if need > limit:
            try:
                model, _ = load_model(build, budget, step_limit=need)
            except StepMemoryError:
                pass
            else:
                model.close()
                return (
                    f"{beginning}; raise it to {format_bytes(need)}, or leave it out for "
                    f"{format_bytes(default_limit(budget.limit))}."
                )
        need *= 2
    return f"{beginning}, and this machine has not enough; take a smaller model."
