"""The policy: ordered rules that say where a request goes. Pure code; the first match wins."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from policies.yaml_nodes import Spot, load, nearest

TIERS = ("edge", "cloud")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LONGEST_NAME = 64
_BESIDE = 1e-9  # just below or above a limit

Name = Annotated[str, Meta(min_length=1)]
Places = Annotated[tuple[Name, ...], Meta(min_length=1)]
"""Tiers or target names, in the order of preference."""


_HOLDS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A condition on a number from 0 to 1, written `>= 0.5`."""

    symbol: str
    value: float

    @classmethod
    def from_text(cls, text: str) -> "Comparison":
        """Read `>= 0.5`.

        Raises:
            ValueError: says what was expected.
        """
        symbol = next((s for s in _HOLDS if text.startswith(s)), "")
        try:
            value = float(text.removeprefix(symbol))
        except ValueError:
            value = -1.0
        if not symbol or not 0 <= value <= 1:
            raise ValueError('a comparison with a number from 0 to 1 such as ">= 0.5"')
        return cls(symbol, value)

    def holds(self, number: float) -> bool:
        """Return whether the number satisfies the condition."""
        return _HOLDS[self.symbol](number, self.value)

    def __str__(self) -> str:
        return f"{self.symbol} {self.value:g}"


class When(msgspec.Struct, frozen=True):
    """Conditions of a rule; all that are given must hold."""

    complexity: Comparison | None = None
    unknown: bool | None = None
    """Whether the request lies outside what the complexity score knows."""


class Rule(msgspec.Struct, frozen=True):
    """Where matching requests go: `to` first, `fallback` when nothing there can take it."""

    name: Name
    to: Places
    when: When = When()
    fallback: tuple[Name, ...] = ()

    def places(self) -> tuple[str, ...]:
        """Return tiers and targets in the order in which they are tried."""
        return self.to + self.fallback


class Policy(msgspec.Struct, frozen=True):
    """A whole policy file. Its last rule has no conditions, so that some rule always matches."""

    version: Literal[1]
    name: Name
    rules: Annotated[tuple[Rule, ...], Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules may ask about a request."""

    complexity: float
    unknown: bool


def load_policy(text: str, source: str, targets: Mapping[str, str]) -> Policy:
    """Read and check a policy.

    Args:
        text: The YAML text.
        source: What messages call the file.
        targets: Tier of each configured target by name.

    Raises:
        YamlProblems: everything that is wrong, at once.
    """

    def check_rule(rule: Rule, spot: Spot) -> None:
        _check_places(rule, spot, targets)

    return load(text, Policy, source, checks={Rule: check_rule, Policy: _check_policy})


def first_match(policy: Policy, facts: Facts) -> Rule:
    """Return the first rule whose conditions hold; the last one takes what is left."""
    for rule in policy.rules[:-1]:
        when = rule.when
        if when.complexity is not None and not when.complexity.holds(facts.complexity):
            continue
        if when.unknown is not None and when.unknown != facts.unknown:
            continue
        return rule
    return policy.rules[-1]


def nearest_change(policy: Policy, facts: Facts) -> tuple[Comparison, Rule] | None:
    """Return the smallest change of complexity that sends the request elsewhere first.

    Returns:
        What the complexity would have to be and the rule that would then match, or None if no
        complexity leads to other places.
    """
    now = first_match(policy, facts).places()
    best: tuple[float, Comparison, Rule] | None = None
    for limit in {r.when.complexity.value for r in policy.rules if r.when.complexity is not None}:
        at = ">=" if facts.complexity < limit else "<="
        for score, symbol in ((limit - _BESIDE, "<"), (limit, at), (limit + _BESIDE, ">")):
            rule = first_match(policy, Facts(score, facts.unknown))
            distance = abs(score - facts.complexity)
            if 0 <= score <= 1 and rule.places() != now and (best is None or distance < best[0]):
                best = (distance, Comparison(symbol, limit), rule)
    return best[1:] if best else None


def name_fault(name: str) -> str | None:
    """Return why `name` cannot name a rule or a target, or None. Names travel in HTTP headers."""
    if len(name) <= _LONGEST_NAME and _NAME.fullmatch(name):
        return None
    return f"a name has at most {_LONGEST_NAME} letters, digits, '-', '_' and '.'"


def _check_places(rule: Rule, spot: Spot, targets: Mapping[str, str]) -> None:
    seen: set[str] = set()
    reachable = False
    for key, names in (("to", rule.to), ("fallback", rule.fallback)):
        for index, name in enumerate(names):
            if name not in TIERS and name not in targets:
                hint = nearest(name, {*TIERS, *targets})
                spot.problem(f"no tier or target is called '{name}'{hint}", key, index)
            if name in seen:
                spot.problem(f"'{name}' stands twice in this rule; remove one", key, index)
            seen.add(name)
            reachable = reachable or name in targets or name in targets.values()
    if not reachable and seen <= {*TIERS, *targets}:
        places = " or ".join(rule.places())
        spot.problem(f"rule '{rule.name}' leads nowhere: no configured target is {places}", "to")


def _check_policy(policy: Policy, spot: Spot) -> None:
    names: set[str] = set()
    last = len(policy.rules) - 1
    for index, rule in enumerate(policy.rules):
        if fault := name_fault(rule.name):
            spot.problem(fault, "rules", index, "name")
        if rule.name in names:
            spot.problem(f"two rules are called '{rule.name}'; rename one", "rules", index, "name")
        names.add(rule.name)
        if rule.when == When() and index < last:
            spot.problem(
                f"rule '{rule.name}' has no conditions, so the rules after it are never reached; "
                "move it to the end",
                "rules",
                index,
            )
    if policy.rules[last].when != When():
        spot.problem(
            "the last rule has conditions, so some requests match no rule; "
            "end with a rule without 'when'",
            "rules",
            last,
            "when",
        )
