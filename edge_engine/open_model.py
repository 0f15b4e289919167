"""From a build folder to a model that steps."""

from edge_engine.kv_budget import KvBudget
from edge_engine.manifest import Build
from edge_engine.past_kv_model import PastKvModel
from edge_engine.runner import Runner
from edge_engine.step_memory import default_limit
from engine_core.batch_model import BatchModel
from engine_core.machine_limits import memory_limit
from engine_core.single_sequence import SingleSequenceModel


def open_model(
    build: Build,
    *,
    context: int | None = None,
    slots: int | None = None,
    kv_memory: int | None = None,
    step_memory: int | None = None,
    threads: int | None = None,
) -> BatchModel:
    """Load a build.

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
        ModelError: `context` is more than the model was made for, or what is asked for does not
            fit `kv_memory`.
    """
    memory = memory_limit()
    limit = step_memory or default_limit(memory)
    budget = KvBudget(kv_memory, memory, context, slots)
    if build.manifest.graph == "gqa":
        return Runner(build, budget, threads=threads, step_limit=limit)
    return SingleSequenceModel(PastKvModel(build, budget, threads=threads, step_limit=limit))
