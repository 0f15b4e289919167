"""Prometheus metrics. Label values come from the configuration and fixed sets only."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from router.observe.engine_stats import EngineStats
from router.observe.record import RequestRecord

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_DECISION_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1)
"""The budget of a decision is 1 ms; the buckets around it show by how much it is kept."""


class Metrics:
    """All metrics of one daemon, in a registry of their own."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tidegate_requests",
            "Requests by how they ended.",
            ("target", "tier", "outcome", "route"),
            registry=self._registry,
        )
        self._failovers = Counter(
            "tidegate_failovers",
            "Tries given up for another target before anything reached the client.",
            ("from_target", "outcome"),
            registry=self._registry,
        )
        self._restarts = Counter(
            "tidegate_engine_restarts",
            "Restarts of child engines by what ended them.",
            ("target", "reason"),
            registry=self._registry,
        )
        self._up = Gauge(
            "tidegate_engine_up",
            "1 while the child engine answers its health check.",
            ("target",),
            registry=self._registry,
        )
        self._engines = EngineStats()
        self._registry.register(self._engines)
        self.in_flight = Gauge(
            "tidegate_in_flight", "Requests being answered.", registry=self._registry
        )
        self._first_token = Histogram(
            "tidegate_first_token_seconds",
            "From a streamed request's arrival to its first content.",
            ("target",),
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.decision_seconds = Histogram(
            "tidegate_decision_seconds",
            "Time to choose the targets of a request.",
            buckets=_DECISION_BUCKETS,
            registry=self._registry,
        )

    def finished(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._requests.labels(record.target, record.tier, record.outcome.value, record.route).inc()
        for target, outcome in record.failovers:
            self._failovers.labels(target, outcome.value).inc()
        if (wait := record.seconds_to_first_token) is not None:
            self._first_token.labels(record.target).observe(wait)

    def engine_restarted(self, target: str, reason: str) -> None:
        """Count a restart of a child engine."""
        self._restarts.labels(target, reason).inc()

    def engine_up(self, target: str, up: bool) -> None:
        """Note whether a child engine is ready."""
        self._up.labels(target).set(up)

    def engine_stats(self, target: str, stats: Mapping[str, object] | None) -> None:
        """Keep what a child engine says about itself; None when it is down."""
        self._engines.note(target, stats)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
