"""From a build folder to a model that steps."""

from edge_engine.gqa_model import GqaModel
from edge_engine.manifest import Build
from edge_engine.past_kv_model import PastKvModel
from engine_core.errors import ModelError
from engine_core.sequential import StepModel

DEFAULT_CONTEXT = 2048
"""Tokens of one sequence where nobody asked for more; key-value memory grows with it."""


def open_model(
    build: Build, *, context: int | None = None, threads: int | None = None
) -> StepModel:
    """Load a build.

    Args:
        build: What `ensure_build` returned.
        context: Tokens of one sequence; None for the model's own limit or `DEFAULT_CONTEXT`,
            whichever is smaller.
        threads: Intra-op threads; None for one per physical core.

    Raises:
        ModelError: `context` is more than the model was made for.
    """
    limit = build.manifest.max_position
    if context is not None and context > limit:
        raise ModelError(
            f"a context of {context} tokens is more than {build.manifest.source} was made for; "
            f"give at most {limit}."
        )
    room = context or min(limit, DEFAULT_CONTEXT)
    if build.manifest.graph == "gqa":
        return GqaModel(build, context=room, threads=threads)
    return PastKvModel(build, context=room, threads=threads)
