"""The composition root: configuration in, running daemon out."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from aiohttp import web

from engine_core.errors import TidegateError
from engine_core.stop_signals import stop_signals
from policies.policy import Policy
from router.api.door import Door
from router.config import Config, TargetConfig, read_key
from router.decide.decision import Decision, TargetInfo, decide
from router.decide.view import RequestView
from router.engines import engine_environment, serve_command
from router.observe.metrics import Metrics
from router.targets.child import ChildEngine
from router.targets.client import UpstreamClient
from router.targets.condition import Condition
from router.targets.socket_folder import socket_folder, socket_path
from router.targets.target import Target

if sys.platform == "win32":
    _new_loop = asyncio.new_event_loop
else:
    from uvloop import new_event_loop as _new_loop

log = logging.getLogger("tidegate")

CUT_SECONDS = 2.0
"""What requests get to tell their clients that they are cut at the end of a drain."""
BACKLOG = 1024


def run(config: Config, policy: Policy) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain; a second signal ends it at once.

    Raises:
        TidegateError: a key cannot be read or the address not be used.
    """
    keys = {name: read_key(target) for name, target in config.targets.items()}
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(Daemon(config, policy, keys).serve())


class Daemon:
    """One Tidegate: the door and its targets.

    Args:
        config: What to listen on and whom to ask.
        policy: What decides.
        keys: Bearer key of each upstream that has one, by target name.
    """

    def __init__(self, config: Config, policy: Policy, keys: Mapping[str, str | None]) -> None:
        self._config = config
        self._policy = policy
        self._keys = keys
        self._metrics = Metrics()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._children: list[ChildEngine] = []

    async def serve(self) -> None:
        """Run from the first socket to the last engine's end."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self.stop)
        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(socket_folder())
            targets = self._make_targets(folder)
            for target in targets.values():
                stack.push_async_callback(target.client.close)
            stack.push_async_callback(self._stop_children)
            door = Door(
                targets=targets,
                decide=self._decide,
                metrics=self._metrics,
                max_body_bytes=self._config.limits.max_body_bytes,
            )
            runner = door.make_runner(shutdown_seconds=CUT_SECONDS)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = await self._listen(runner)
            for child in self._children:
                child.start()
            announcing = asyncio.create_task(self._announce(_url(runner), targets))
            try:
                await self._stop.wait()
            finally:
                announcing.cancel()
            await self._drain(door, site)

    def stop(self) -> None:
        """Begin to drain; called again, end at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _make_targets(self, folder: Path) -> dict[str, Target]:
        environment = engine_environment(os.environ, self._config.targets.values())
        targets = {}
        for number, (name, config) in enumerate(self._config.targets.items()):
            if config.url is not None:
                client = UpstreamClient(config.url, key=self._keys.get(name))
                condition = Condition(
                    state="ready",
                    reason="a remote server, not probed",
                    model=config.model,
                    context_window=config.context,
                )
            else:
                socket = socket_path(folder, number)
                child = self._make_child(name, config, socket, environment)
                self._children.append(child)
                client = UpstreamClient("http://engine/v1", socket=socket)
                condition = child.condition
            targets[name] = Target(name=name, tier=config.tier, client=client, condition=condition)
        return targets

    def _make_child(
        self, name: str, config: TargetConfig, socket: Path, environment: Mapping[str, str]
    ) -> ChildEngine:
        return ChildEngine(
            name=name,
            model=config.model,
            command=serve_command(config, socket),
            socket=socket,
            environment=environment,
            on_restart=lambda reason: self._metrics.engine_restarted(name, reason),
            on_ready=lambda up: self._metrics.engine_up(name, up),
            on_stats=lambda stats: self._metrics.engine_stats(name, stats),
        )

    def _decide(
        self, view: RequestView, model: str, targets: Sequence[TargetInfo], decision_id: str
    ) -> Decision:
        return decide(view, model, self._policy, targets, decision_id)

    async def _listen(self, runner: web.AppRunner) -> web.TCPSite:
        host, port = self._config.listen.host, self._config.listen.port
        site = web.TCPSite(runner, host, port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise TidegateError(
                    f"port {port} of {host} is in use; stop the program that uses it (another "
                    "tidegate?) or set listen.port in the configuration"
                ) from None
            raise TidegateError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; "
                "change listen.host or listen.port in the configuration"
            ) from None
        return site

    async def _announce(self, url: str, targets: Mapping[str, Target]) -> None:
        """Say where to knock, once every engine has started or failed to."""
        log.info("listening on %s; waiting for the engines", url)
        for child in self._children:
            await child.settled.wait()
        sys.stderr.write(f"\n{announcement(url, targets.values())}\n\n")
        sys.stderr.flush()

    async def _drain(self, door: Door, site: web.TCPSite) -> None:
        """Take no more, let running answers finish, cut what is left."""
        door.in_flight.draining = True
        await site.stop()
        if door.in_flight:
            seconds = self._config.drain_seconds
            log.info("draining for up to %g s, requests: %d", seconds, len(door.in_flight))
            idle = asyncio.create_task(door.in_flight.wait_idle())
            hurry = asyncio.create_task(self._hurry.wait())
            await asyncio.wait({idle, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if door.in_flight:
                log.warning("cutting requests: %d", len(door.in_flight))
                door.in_flight.cut()
                await asyncio.wait({idle}, timeout=CUT_SECONDS)
            idle.cancel()
            hurry.cancel()
        log.info("stopping the engines")

    async def _stop_children(self) -> None:
        await asyncio.gather(*(child.stop() for child in self._children))


def announcement(url: str, targets: Iterable[Target]) -> str:
    """Return what a person reads once every target has settled: who answers, or why nobody does."""
    ready = False
    lines = []
    for target in targets:
        condition = target.condition
        ready = ready or condition.state == "ready"
        lines.append(f"  {target.name} ({target.tier}, {condition.model}): {condition.reason}")
    if ready:
        return "\n".join([f"Tidegate answers at {url}/v1", *lines, "Try it:", f"  {example(url)}"])
    return "\n".join(
        [
            f"Tidegate runs, but nothing can answer at {url}/v1: no engine could start",
            *lines,
            "A start is tried again every now and then, which helps once what is missing is there.",
            "After a change of the configuration, stop Tidegate (Ctrl-C, SIGTERM) and start it again.",
        ]
    )


def example(url: str) -> str:
    """Return a command that asks a first question; `-i` shows who answered."""
    body = {
        "model": "auto",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    return (
        f"curl -i {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )


def _url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
