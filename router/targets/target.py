"""One thing that can answer: its place, how to talk to it, and how it is."""

from dataclasses import dataclass

from router.targets.client import UpstreamClient
from router.targets.condition import Condition


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine child or an upstream server.

    Args:
        name: From the configuration.
        tier: `edge` or `cloud`.
        client: Connection to it.
        condition: Kept true by the child's supervisor; constant for an upstream.
    """

    name: str
    tier: str
    client: UpstreamClient
    condition: Condition
