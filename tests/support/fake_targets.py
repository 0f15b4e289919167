"""A door on a free port, in front of fake upstreams."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from importlib import resources

import aiohttp
from aiohttp import web
from fake_upstream import FakeUpstream

from policies.policy import load_policy
from router.api.door import Door
from router.decide.decision import decide
from router.observe.metrics import Metrics
from router.targets.client import UpstreamClient
from router.targets.condition import Condition
from router.targets.target import Target

EASY = "What is the capital of France?"
HARD = "Prove that there are infinitely many primes of the form 4k + 3, step by step."


@dataclass
class OpenDoor:
    url: str
    door: Door
    metrics: Metrics
    targets: dict[str, Target]
    session: aiohttp.ClientSession
    runner: web.AppRunner

    def ask(
        self,
        text: str = EASY,
        *,
        model: str = "auto",
        headers: Mapping[str, str] | None = None,
        **more: object,
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a chat request; use it as a context."""
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, **more}
        return self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)

    def metric(self, line: str) -> float:
        """Return the value of the sample that starts with this text, 0 if there is none."""
        for row in self.metrics.render().decode().splitlines():
            if row.startswith(line + " "):
                return float(row.rpartition(" ")[2])
        return 0.0


@contextlib.asynccontextmanager
async def open_door(
    *, max_body_bytes: int = 1 << 20, **upstreams: FakeUpstream | str
) -> AsyncIterator[OpenDoor]:
    """Open a door; `edge` and `cloud` are targets of these tiers. A text is a base URL."""
    targets = {
        name: Target(
            name=name,
            tier="cloud" if name.startswith("cloud") else "edge",
            client=UpstreamClient(u if isinstance(u, str) else u.url),
            condition=Condition(state="ready", reason="ready", model=f"model-of-{name}"),
        )
        for name, u in upstreams.items()
    }
    text = (resources.files("policies") / "default.yaml").read_text(encoding="utf-8")
    policy = load_policy(text, "default.yaml", {n: t.tier for n, t in targets.items()})
    metrics = Metrics()
    door = Door(
        targets=targets,
        decide=lambda view, model, infos, id_: decide(view, model, policy, infos, id_),
        metrics=metrics,
        max_body_bytes=max_body_bytes,
    )
    runner = door.make_runner(shutdown_seconds=5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    session = aiohttp.ClientSession(auto_decompress=False)
    try:
        yield OpenDoor(url, door, metrics, targets, session, runner)
    finally:
        await session.close()
        await runner.cleanup()
        for target in targets.values():
            await target.client.close()
        assert len(door.in_flight) == 0
