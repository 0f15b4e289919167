"""Every ending has a status, and only those fail over that another target could avoid."""

import pytest

from router.guard.outcomes import (
    CONTEXT_LENGTH_EXCEEDED,
    FAILS_OVER,
    TOO_MANY_CHOICES,
    Outcome,
    UpstreamFailure,
)


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
def test_every_failure_has_a_status_and_a_code(outcome: Outcome) -> None:
    failure = UpstreamFailure(outcome, "x")
    assert 400 <= failure.status <= 599
    assert failure.code == outcome.value
    assert failure.may_fail_over is (outcome in FAILS_OVER)


@pytest.mark.parametrize("code", [CONTEXT_LENGTH_EXCEEDED, TOO_MANY_CHOICES])
def test_what_is_too_large_for_one_target_may_fit_another(code: str) -> None:
    assert UpstreamFailure(Outcome.INVALID, "x", code=code).may_fail_over
    assert not UpstreamFailure(Outcome.INVALID, "x").may_fail_over


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.CLIENT_CLOSED,
        Outcome.INVALID,
        Outcome.TIMEOUT_TOTAL,
        Outcome.DEADLINE,
        Outcome.DRAINING,
        Outcome.POLICY_DENY,
        Outcome.NO_TARGET,
    ],
)
def test_what_no_other_target_could_do_better_stays(outcome: Outcome) -> None:
    assert outcome not in FAILS_OVER
