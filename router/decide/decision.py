"""One explained decision: which targets a request is offered to, in order, and why."""

import math
from collections.abc import Iterator, Sequence

import msgspec

from engine_core.errors import InvalidRequestError
from policies.policy import (
    TIERS,
    Facts,
    Policy,
    Rule,
    first_match,
    nearest_change,
)
from router.decide.complexity import Complexity, estimate
from router.decide.view import RequestView

AUTO = "auto"
"""The model name that lets the policy choose."""

_FIELD = {
    "json": "response_format",
    "audio": "audio",
    "prompts": "prompt",
    "custom_tools": "tools",
    "web_search": "web_search_options",
}
"""The request field that asks for a capability, where it is not called the same."""


class TargetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A target as it is now.

    Args:
        name: From the configuration.
        tier: `edge` or `cloud`.
        ready: Whether it takes requests.
        capabilities: What it can do beyond text; None means that it may be asked for anything.
        context_window: Tokens of prompt and answer together; None if unknown.
        reason: In words, why it is not ready.
    """

    name: str
    tier: str
    ready: bool
    capabilities: frozenset[str] | None = None
    context_window: int | None = None
    reason: str = "not ready"


class Candidate(msgspec.Struct, frozen=True):
    """A target that was looked at; `passed_over` says why it is not offered the request."""

    target: str
    tier: str
    passed_over: str | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes and why.

    Args:
        id: Names the decision in headers and logs.
        model_asked: The model name of the request.
        rule: Name of the policy's rule, or `model:NAME` if the request named a tier or a target.
        complexity: How hard the request looks.
        candidates: All targets: those of the rule in its order, then the others.
        changed_by: What would have sent the request elsewhere.
    """

    id: str
    model_asked: str
    rule: str
    complexity: Complexity
    candidates: tuple[Candidate, ...]
    changed_by: str

    @property
    def chosen(self) -> list[str]:
        """Names of the targets to try, in order."""
        return [c.target for c in self.candidates if c.passed_over is None]


def decide(
    view: RequestView,
    model: str,
    policy: Policy,
    targets: Sequence[TargetInfo],
    decision_id: str,
) -> Decision:
    """Choose the targets for a request. Pure; takes about as long as the complexity score.

    Raises:
        InvalidRequestError: 404 `model_not_found` if no policy, tier or target has this name;
            400 `unsupported_parameter` if no target that may answer can do what is asked.
    """
    complexity = estimate(view.ask)
    facts = Facts(complexity=complexity.score, unknown=complexity.unknown)
    rule = None
    if model == AUTO:
        rule = first_match(policy, facts)
        allowed = list(_in_order(rule, targets))
    else:
        allowed = _pinned(model, targets)
    able = [target for target in allowed if _lacking(view, target) == ""]
    if not able:
        raise _refusal(view, allowed)
    widest = max((_window(target) for target in able if target.ready), default=0)
    candidates = [_judge(view, target, widest) for target in allowed]
    foreign = "not in the rule" if rule else f"the request asks for model '{model}'"
    candidates += [Candidate(t.name, t.tier, foreign) for t in targets if t not in allowed]
    return Decision(
        id=decision_id,
        model_asked=model,
        rule=rule.name if rule else f"model:{model}",
        complexity=complexity,
        candidates=tuple(candidates),
        changed_by=_changed_by(policy, facts, rule, candidates),
    )


def _in_order(rule: Rule, targets: Sequence[TargetInfo]) -> Iterator[TargetInfo]:
    """Yield the rule's targets once each, in the order of the rule and then of the configuration."""
    seen: set[str] = set()
    for place in rule.places():
        for target in targets:
            if target.name not in seen and _means(place, target):
                seen.add(target.name)
                yield target


def _means(name: str, target: TargetInfo) -> bool:
    """Say whether a place of a policy, or a model's name, stands for a target."""
    return name == (target.tier if name in TIERS else target.name)


def _pinned(model: str, targets: Sequence[TargetInfo]) -> list[TargetInfo]:
    """Return the targets that a model name means; a tier's name means all of the tier."""
    if pinned := [target for target in targets if _means(model, target)]:
        return pinned
    names = dict.fromkeys([AUTO, *(t.tier for t in targets), *(t.name for t in targets)])
    raise InvalidRequestError(
        f"There is no model of this name here; use one of: {', '.join(names)}.",
        param="model",
        code="model_not_found",
        status=404,
    )


def _lacking(view: RequestView, target: TargetInfo) -> str:
    """Return what the target cannot do, or an empty text."""
    if target.capabilities is None:
        return ""
    return ", ".join(sorted(view.needs - target.capabilities))


def _window(target: TargetInfo) -> float:
    return math.inf if target.context_window is None else target.context_window


def _refusal(view: RequestView, allowed: Sequence[TargetInfo]) -> InvalidRequestError:
    need = _lacking(view, allowed[0]).split(", ")[0]
    if need in view.parts:
        part = view.parts[need]
        return InvalidRequestError(
            f"No target that may answer this request reads {need}, and '{part}' is no text; leave "
            "it out, or configure a target that does.",
            param=part,
            code="unsupported_parameter",
        )
    field = _FIELD.get(need, need)
    return InvalidRequestError(
        f"No target that may answer this request supports '{field}' with this value; "
        "leave it out, or configure a target that does.",
        param=field,
        code="unsupported_parameter",
    )


def _judge(view: RequestView, target: TargetInfo, widest: float) -> Candidate:
    """Say whether a target is offered the request.

    The target with the widest window is never passed over for its window: the estimate is
    cautious, and the engine that counts the tokens gives the true refusal.
    """
    passed_over = None
    tokens = view.prompt_tokens + (view.new_tokens or 1)
    window = _window(target)
    if lacking := _lacking(view, target):
        passed_over = f"it does not support {lacking}"
    elif not target.ready:
        passed_over = target.reason
    elif tokens > window and window < widest:
        passed_over = f"about {tokens} tokens do not fit its context window of {window}"
    return Candidate(target.name, target.tier, passed_over)


def _changed_by(
    policy: Policy, facts: Facts, rule: Rule | None, candidates: Sequence[Candidate]
) -> str:
    first = candidates[0]
    if first.passed_over is not None:
        return f"'{first.target}' would be first, but {first.passed_over}"
    if rule is None:
        return f"model '{AUTO}' would let the policy choose"
    change = nearest_change(policy, facts)
    if change is None:
        return "no complexity would send it elsewhere"
    condition, other = change
    return (
        f"complexity {condition} instead of {facts.complexity:.2f} "
        f"would match rule '{other.name}' and go to {other.to[0]} first"
    )
