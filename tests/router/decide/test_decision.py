"""The decision: who is offered a request, in which order, who is passed over and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.errors import InvalidRequestError
from policies.policy import Comparison, Policy, Rule, When
from router.decide.decision import Decision, TargetInfo, decide
from router.decide.view import RequestView

EASY = "What is the capital of France?"
HARD = "Prove that the square root of 2 is irrational."
POLICY = Policy(
    1,
    "p",
    (
        Rule("hard", ("cloud",), When(complexity=Comparison(">=", 0.5)), ("edge",)),
        Rule("easy", ("edge",), When(), ("cloud",)),
    ),
)


def target(name: str, tier: str = "edge", **fields: object) -> TargetInfo:
    given: dict[str, object] = {"ready": True, "capabilities": frozenset(), "context_window": 2048}
    return TargetInfo(name=name, tier=tier, **(given | fields))  # type: ignore[arg-type]


EDGE = target("edge")
CLOUD = target("cloud", "cloud")


def view(ask: str = EASY, tokens: int = 20, **fields: object) -> RequestView:
    return RequestView(ask=ask, prompt_tokens=tokens, **fields)  # type: ignore[arg-type]


def run(
    request: RequestView, *targets: TargetInfo, model: str = "auto", policy: Policy = POLICY
) -> Decision:
    return decide(request, model, policy, targets or (EDGE, CLOUD), "d1")


def passed_over(decision: Decision) -> dict[str, str]:
    return {c.target: c.passed_over for c in decision.candidates if c.passed_over}


@pytest.mark.parametrize(
    ("ask", "rule", "chosen"),
    [(EASY, "easy", ["edge", "cloud"]), (HARD, "hard", ["cloud", "edge"])],
)
def test_the_policy_orders_the_tiers(ask: str, rule: str, chosen: list[str]) -> None:
    decision = run(view(ask))
    assert (decision.rule, decision.chosen) == (rule, chosen)
    assert (decision.id, decision.model_asked) == ("d1", "auto")


def test_targets_of_a_tier_keep_the_order_of_the_configuration() -> None:
    decision = run(view(), target("b"), CLOUD, target("a"))
    assert decision.chosen == ["b", "a", "cloud"]


def test_a_target_is_listed_once_even_if_its_tier_comes_later() -> None:
    policy = Policy(1, "p", (Rule("all", ("a", "edge")),))
    assert run(view(), target("b"), target("a"), policy=policy).chosen == ["a", "b"]


def test_targets_outside_the_rule_are_listed_as_passed_over() -> None:
    policy = Policy(1, "p", (Rule("all", ("edge",)),))
    assert passed_over(run(view(), policy=policy)) == {"cloud": "not in the rule"}


@pytest.mark.parametrize(
    ("model", "chosen"), [("edge", ["edge", "other"]), ("cloud", ["cloud"]), ("other", ["other"])]
)
def test_a_model_name_pins_its_tier_or_target(model: str, chosen: list[str]) -> None:
    decision = run(view(HARD), EDGE, CLOUD, target("other"), model=model)
    assert decision.chosen == chosen
    assert decision.rule == f"model:{model}"
    rest = {"edge", "cloud", "other"} - set(chosen)
    assert passed_over(decision) == dict.fromkeys(rest, f"the request asks for model '{model}'")


def test_a_pinned_tier_that_is_down_has_no_substitute() -> None:
    decision = run(view(), target("edge", ready=False), CLOUD, model="edge")
    assert decision.chosen == []


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        run(view(), model="gpt-9")
    error = caught.value
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "auto, edge, cloud" in error.message
    assert "gpt-9" not in error.message


def test_a_target_that_is_not_ready_is_passed_over_with_its_reason() -> None:
    decision = run(view(), target("edge", ready=False, reason="starting"), CLOUD)
    assert decision.chosen == ["cloud"]
    assert passed_over(decision) == {"edge": "starting"}
    assert decision.changed_by == "'edge' would be first, but starting"


@pytest.mark.parametrize("need", ["images", "audio"])
def test_a_part_that_no_target_can_read_is_named_with_its_place(need: str) -> None:
    place = "messages[3].content[1]"
    with pytest.raises(InvalidRequestError, match=f"reads {need}") as caught:
        run(view(needs=frozenset({need}), parts={need: place}))
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", place)


def test_a_target_that_lacks_a_capability_is_passed_over() -> None:
    needy = view(needs=frozenset({"tools"}))
    decision = run(needy, EDGE, target("cloud", "cloud", capabilities=None))
    assert decision.chosen == ["cloud"]
    assert passed_over(decision) == {"edge": "it does not support tools"}


@pytest.mark.parametrize(
    ("need", "param"),
    [("tools", "tools"), ("json", "response_format"), ("audio", "audio"), ("n", "n")],
)
def test_what_no_target_can_do_is_refused_by_its_field(need: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        run(view(needs=frozenset({need})))
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", param)


def test_a_pin_to_a_target_without_the_capability_is_refused() -> None:
    able = target("cloud", "cloud", capabilities=None)
    with pytest.raises(InvalidRequestError):
        run(view(needs=frozenset({"tools"})), EDGE, able, model="edge")


def test_a_capable_target_that_is_down_is_no_reason_to_refuse() -> None:
    able = target("cloud", "cloud", capabilities=frozenset({"tools"}), ready=False)
    assert run(view(needs=frozenset({"tools"})), EDGE, able).chosen == []


@pytest.mark.parametrize("window", [8192, None])
def test_a_request_that_does_not_fit_goes_to_a_wider_window(window: int | None) -> None:
    wide = target("cloud", "cloud", context_window=window)
    decision = run(view(tokens=1500, new_tokens=1000), EDGE, wide)
    assert decision.chosen == ["cloud"]
    assert passed_over(decision) == {
        "edge": "about 2500 tokens do not fit its context window of 2048"
    }


def test_the_widest_window_is_tried_even_if_the_estimate_says_no() -> None:
    wide = target("cloud", "cloud", context_window=4096)
    assert run(view(tokens=9000), EDGE, wide).chosen == ["cloud"]
    assert run(view(tokens=9000), EDGE, CLOUD).chosen == ["edge", "cloud"]


def test_a_wider_window_that_is_down_does_not_count() -> None:
    wide = target("cloud", "cloud", context_window=8192, ready=False)
    assert run(view(tokens=3000), EDGE, wide).chosen == ["edge"]


def test_what_would_change_the_decision_is_said() -> None:
    assert run(view(HARD)).changed_by.startswith("complexity < 0.5 instead of 0.")
    assert run(view()).changed_by.endswith("would match rule 'hard' and go to cloud first")
    assert run(view(), model="edge").changed_by == "model 'auto' would let the policy choose"
    always = Policy(1, "p", (Rule("all", ("edge",)),))
    assert run(view(), policy=always).changed_by == "no complexity would send it elsewhere"


places = st.lists(st.sampled_from(["edge", "cloud"]), min_size=1, max_size=2, unique=True)
needs = st.frozensets(st.sampled_from(["tools", "json", "n"]), max_size=2)
targets = st.lists(
    st.builds(
        TargetInfo,
        name=st.sampled_from(["edge", "e1", "e2", "c1", "c2"]),
        tier=st.just("edge"),
        ready=st.booleans(),
        capabilities=st.none() | needs,
        context_window=st.none() | st.sampled_from([100, 1000]),
    ).map(
        lambda t: TargetInfo(
            name=t.name,
            tier="cloud" if t.name.startswith("c") else "edge",
            ready=t.ready,
            capabilities=t.capabilities,
            context_window=t.context_window,
        )
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda t: t.name,
)
requests = st.builds(
    RequestView,
    ask=st.sampled_from([EASY, HARD, ""]),
    prompt_tokens=st.integers(1, 2000),
    new_tokens=st.none() | st.integers(1, 2000),
    needs=needs,
)


@given(requests, st.sampled_from(["auto", "edge", "cloud", "e1", "c1"]), targets, st.data())
def test_pins_hold_and_the_order_is_the_policys(
    request: RequestView, model: str, infos: list[TargetInfo], data: st.DataObject
) -> None:
    rules = [
        Rule("hard", tuple(data.draw(places)), When(complexity=Comparison(">=", 0.5))),
        Rule("rest", ("edge", "cloud")),
    ]
    policy = Policy(1, "p", tuple(rules))
    tiers = {info.tier for info in infos}
    if not set(rules[0].to) & tiers:
        return  # such a policy is refused when it is loaded
    try:
        decision = decide(request, model, policy, infos, "d")
    except InvalidRequestError:
        return
    assert decision == decide(request, model, policy, infos, "d")
    assert sorted(c.target for c in decision.candidates) == sorted(i.name for i in infos)
    by_name = {info.name: info for info in infos}
    for name in decision.chosen:
        info = by_name[name]
        assert info.ready
        assert info.capabilities is None or request.needs <= info.capabilities
        if model in ("edge", "cloud"):
            assert info.tier == model
        elif model != "auto":
            assert name == model
    if model == "auto":
        rule = next(r for r in rules if r.name == decision.rule)
        order = [i.name for place in rule.to for i in infos if i.tier == place]
        assert decision.chosen == [name for name in order if name in decision.chosen]
