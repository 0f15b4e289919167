"""What is known of one request when it ends: the source of metrics and of its log line."""

import logging
from dataclasses import dataclass, field

from router.guard.outcomes import Outcome

log = logging.getLogger("tidegate.request")

NOBODY = "none"
"""Target and tier of a request that no target was asked to answer."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request's life. Times are monotonic seconds; never holds text of the request."""

    route: str
    started: float
    stream: bool = False
    decision: str = "-"
    rule: str = "-"
    complexity: float | None = None
    target: str = NOBODY
    tier: str = NOBODY
    outcome: Outcome = Outcome.OK
    code: str | None = None
    status: int = 200
    first_token: float | None = None
    """When the stream was committed."""
    ended: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    failovers: list[tuple[str, Outcome]] = field(default_factory=list)
    """Targets that were tried and given up for the next one, and why."""

    @property
    def seconds(self) -> float:
        """Duration of the request."""
        return self.ended - self.started

    @property
    def seconds_to_first_token(self) -> float | None:
        """From the request's arrival to the commit of its stream."""
        return None if self.first_token is None else self.first_token - self.started


def log_request(record: RequestRecord) -> None:
    """Write the request's one log line."""
    wait = record.seconds_to_first_token
    log.info(
        "decision=%s route=%s target=%s rule=%r complexity=%s outcome=%s code=%s status=%d "
        "failovers=%s stream=%s ttft_ms=%s ms=%.1f bytes_in=%d bytes_out=%d",
        record.decision,
        record.route,
        record.target,
        record.rule,
        "-" if record.complexity is None else f"{record.complexity:.2f}",
        record.outcome.value,
        record.code or "-",
        record.status,
        ",".join(f"{target}:{outcome.value}" for target, outcome in record.failovers) or "-",
        str(record.stream).lower(),
        "-" if wait is None else f"{wait * 1000:.1f}",
        record.seconds * 1000,
        record.bytes_in,
        record.bytes_out,
    )
