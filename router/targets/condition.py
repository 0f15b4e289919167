"""Whether a target can answer now, and what it can do."""

from dataclasses import dataclass
from typing import Literal

State = Literal["starting", "ready", "down"]


@dataclass(slots=True, kw_only=True)
class Condition:
    """What is known about a target; a child's supervisor keeps it true.

    Args:
        state: Only a `ready` target is offered requests.
        reason: In words, for people: why it is in this state.
        model: The model name to send to it.
        context_window: Most tokens of one sequence; None if unknown.
        capabilities: What it takes beyond plain text (`tools`, `json`, ...); None for a
            foreign server and for an engine that is not known yet, which may take anything.
    """

    state: State
    reason: str
    model: str
    context_window: int | None = None
    capabilities: frozenset[str] | None = None
