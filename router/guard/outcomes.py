"""How one try on a target, and one request, ends."""

from enum import StrEnum


class Outcome(StrEnum):
    """The house's words for an ending; they are label values in metrics and logs."""

    OK = "ok"
    CLIENT_CLOSED = "client_closed"
    INVALID = "invalid"
    UPSTREAM_ERROR = "upstream_error"
    TIMEOUT_CONNECT = "timeout_connect"
    TIMEOUT_FIRST_TOKEN = "timeout_first_token"  # noqa: S105 - a token of text
    TIMEOUT_IDLE = "timeout_idle"
    TIMEOUT_TOTAL = "timeout_total"
    RATE_LIMITED = "rate_limited"
    MEM_REJECT = "mem_reject"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    DRAINING = "draining"
    NO_TARGET = "no_target"
    POLICY_DENY = "policy_deny"


FAILS_OVER = frozenset(
    {
        Outcome.UPSTREAM_ERROR,
        Outcome.TIMEOUT_CONNECT,
        Outcome.TIMEOUT_FIRST_TOKEN,
        Outcome.TIMEOUT_IDLE,
        Outcome.RATE_LIMITED,
        Outcome.MEM_REJECT,
        Outcome.QUEUE_FULL,
    }
)
"""Endings of a try after which another target may do better, if nothing reached the client.

The total timeout and the client's deadline are not among them: the time is spent on any target.
Nor is draining, which is the router's own end.
"""

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's error code of a prompt that the target's context window cannot hold."""

TOO_MANY_CHOICES = "too_many_choices"
"""Error code of our engines for more choices than the target can hold at once."""
_ONLY_HERE = frozenset({CONTEXT_LENGTH_EXCEEDED, TOO_MANY_CHOICES})
"""Codes of refusals that depend on the target's size."""

_STATUS = {
    Outcome.UPSTREAM_ERROR: 502,
    Outcome.TIMEOUT_CONNECT: 504,
    Outcome.TIMEOUT_FIRST_TOKEN: 504,
    Outcome.TIMEOUT_IDLE: 504,
    Outcome.TIMEOUT_TOTAL: 504,
    Outcome.DEADLINE: 504,
    Outcome.DRAINING: 503,
    Outcome.RATE_LIMITED: 503,
    Outcome.MEM_REJECT: 503,
    Outcome.QUEUE_FULL: 503,
    Outcome.NO_TARGET: 503,
    Outcome.INVALID: 400,
    Outcome.POLICY_DENY: 403,
    Outcome.CLIENT_CLOSED: 499,
}


class UpstreamFailure(Exception):  # noqa: N818 - the house's word; it also carries refusals
    """One try on a target did not end well.

    Args:
        outcome: What happened.
        message: For the client's developer; holds no secret and no prompt.
        status: The upstream's HTTP status where the client should see it (its own mistakes).
        code: Machine-readable reason; defaults to the outcome's word.
        param: The request field at fault, if the upstream named one.
        retry_after: Seconds after which the upstream wants to be asked again.
    """

    def __init__(
        self,
        outcome: Outcome,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.status = status or _STATUS[outcome]
        self.code = code or outcome.value
        self.param = param
        self.retry_after = retry_after

    @property
    def may_fail_over(self) -> bool:
        """Whether another target may do better with the same request."""
        return self.outcome in FAILS_OVER or self.code in _ONLY_HERE

    def type(self) -> str:
        """Return OpenAI's `error.type` for this ending."""
        if self.outcome in (Outcome.INVALID, Outcome.POLICY_DENY):
            return "invalid_request_error"
        return "overloaded_error" if self.status == 503 else "server_error"
