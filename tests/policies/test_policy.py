"""Policies: the packaged one, first match, and the smallest change that leads elsewhere."""

from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import YamlProblems
from policies.policy import (
    Comparison,
    Facts,
    Policy,
    Rule,
    When,
    first_match,
    load_policy,
    nearest_change,
)

TARGETS = {"edge": "edge", "cloud": "cloud"}


@pytest.fixture(scope="module")
def default() -> Policy:
    text = (resources.files("policies") / "default.yaml").read_text(encoding="utf-8")
    return load_policy(text, "default.yaml", TARGETS)


@pytest.mark.parametrize(
    ("score", "unknown", "rule", "places"),
    [
        (0.0, False, "easy", ("edge", "cloud")),
        (0.49, False, "easy", ("edge", "cloud")),
        (0.5, False, "hard", ("cloud", "edge")),
        (1.0, False, "hard", ("cloud", "edge")),
        (0.0, True, "unknown", ("cloud", "edge")),
    ],
)
def test_the_default_policy_splits_at_one_half(
    default: Policy, score: float, unknown: bool, rule: str, places: tuple[str, ...]
) -> None:
    match = first_match(default, Facts(score, unknown))
    assert (match.name, match.places()) == (rule, places)


@pytest.mark.parametrize("targets", [{"a": "edge"}, {"b": "cloud"}])
def test_the_default_policy_serves_a_configuration_with_one_tier(targets: dict[str, str]) -> None:
    text = (resources.files("policies") / "default.yaml").read_text(encoding="utf-8")
    load_policy(text, "default.yaml", targets)


def test_a_rule_for_which_nothing_is_configured_leads_nowhere() -> None:
    text = "version: 1\nname: p\nrules:\n  - {name: all, to: [cloud]}\n"
    with pytest.raises(YamlProblems, match=r"4:17: rule 'all' leads nowhere") as caught:
        load_policy(text, "p", {"a": "edge"})
    assert str(caught.value).endswith("no configured target is cloud")


def test_target_names_may_stand_where_tiers_stand() -> None:
    text = "version: 1\nname: p\nrules:\n  - {name: all, to: [provider, edge]}\n"
    policy = load_policy(text, "p", TARGETS | {"provider": "cloud"})
    assert policy.rules[0].places() == ("provider", "edge")


@pytest.mark.parametrize(
    ("text", "below", "at", "above"),
    [
        (">= 0.5", False, True, True),
        ("> 0.5", False, False, True),
        ("<= 0.5", True, True, False),
        ("<0.5", True, False, False),
    ],
)
def test_a_comparison_holds_on_its_side(text: str, below: bool, at: bool, above: bool) -> None:
    comparison = Comparison.from_text(text)
    assert [comparison.holds(x) for x in (0.4, 0.5, 0.6)] == [below, at, above]


@pytest.mark.parametrize(
    "text", ["", "0.5", "= 0.5", ">= ", ">= half", ">= nan", ">= -1", "=> 0.5"]
)
def test_what_is_no_comparison_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a comparison with a number from 0 to 1"):
        Comparison.from_text(text)


@pytest.mark.parametrize(
    ("score", "change", "rule"), [(0.2, ">= 0.5", "hard"), (0.7, "< 0.5", "easy")]
)
def test_the_nearest_change_names_the_threshold_and_the_other_rule(
    default: Policy, score: float, change: str, rule: str
) -> None:
    found = nearest_change(default, Facts(score, unknown=False))
    assert found is not None
    assert (str(found[0]), found[1].name) == (change, rule)


def test_there_is_no_change_where_complexity_does_not_matter(default: Policy) -> None:
    assert nearest_change(default, Facts(0.2, unknown=True)) is None


comparisons = st.builds(
    Comparison,
    st.sampled_from([">=", "<=", ">", "<"]),
    st.integers(0, 20).map(lambda n: n / 20),
)
whens = st.builds(When, complexity=st.none() | comparisons, unknown=st.none() | st.booleans())
places = st.sampled_from([("edge",), ("cloud",), ("edge", "cloud"), ("cloud", "edge")])
facts = st.builds(Facts, st.floats(0, 1), st.booleans())


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    conditions = [*draw(st.lists(whens, max_size=6)), When()]
    rules = [Rule(f"r{n}", draw(places), when) for n, when in enumerate(conditions)]
    return Policy(1, "p", tuple(rules))


@given(policies(), facts)
def test_the_first_rule_whose_conditions_hold_matches(policy: Policy, fact: Facts) -> None:
    def holds(when: When) -> bool:
        return (when.complexity is None or when.complexity.holds(fact.complexity)) and (
            when.unknown is None or when.unknown == fact.unknown
        )

    assert first_match(policy, fact) == next(r for r in policy.rules if holds(r.when))


@given(policies(), facts)
def test_doing_what_the_nearest_change_says_leads_elsewhere(policy: Policy, fact: Facts) -> None:
    found = nearest_change(policy, fact)
    if found is None:
        for n in range(101):
            other = first_match(policy, Facts(n / 100, fact.unknown))
            assert other.places() == first_match(policy, fact).places()
        return
    condition, rule = found
    shift = {"<": -1e-9, ">": 1e-9}.get(condition.symbol, 0)
    changed = first_match(policy, Facts(condition.value + shift, fact.unknown))
    assert changed == rule
    assert rule.places() != first_match(policy, fact).places()
