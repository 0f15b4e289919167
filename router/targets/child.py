"""Supervisor of one child engine: start, watch, restart with backoff, stop.

The child gets one end of a pipe as its standard input and ends itself when the daemon's end
closes, so that even a killed daemon leaves no engine behind.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from router.targets.condition import Condition, State
from router.targets.stderr_tail import StderrTail

T = TypeVar("T")

log = logging.getLogger("tidegate.child")

START_POLL_SECONDS = 0.1
START_NOTE_SECONDS = 30.0
"""How often a long start (a download, a build) is mentioned in the log."""
HEALTH_PERIOD_SECONDS = 2.0
HEALTH_TIMEOUT_SECONDS = 5.0
HEALTH_FAILURES = 3
"""An engine that misses this many health checks in a row hangs, and is killed."""
BACKOFF_FIRST_SECONDS = 0.5
BACKOFF_CAP_SECONDS = 30.0
STABLE_SECONDS = 60.0
"""An engine that lived this long has earned a fast restart again."""
STOP_SECONDS = 5.0
"""From SIGTERM to SIGKILL."""
USAGE_EXIT_CODE = 2
"""The engine cannot start as configured; only a person can change that."""


class _Health(msgspec.Struct):
    model: str
    context_window: int
    capabilities: list[str] = []


@dataclass(frozen=True, slots=True)
class _Death:
    """Why one life of the engine ended: a metric label and a sentence."""

    label: str
    reason: str
    usage_error: bool = False


class ChildEngine:
    """One engine process that is kept alive.

    Args:
        name: The target's name.
        model: What it is configured to serve; the engine says how it calls it.
        command: Program and arguments; must serve on `socket` and honour a closed stdin.
        socket: UNIX socket on which the engine answers.
        environment: The child's whole environment.
        on_restart: Called with a reason out of `exit`, `signal`, `unresponsive`, `usage` each
            time the engine has to be started again.
        on_ready: Called with True and False when it becomes ready and stops being ready.
        on_stats: Called with what the engine says about itself, once a health check, and with None
            when it is down.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str,
        command: Sequence[str],
        socket: Path,
        environment: Mapping[str, str],
        on_restart: Callable[[str], None],
        on_ready: Callable[[bool], None],
        on_stats: Callable[[Mapping[str, object] | None], None],
    ) -> None:
        self.name = name
        # Until its first health check an engine may be able to do anything: a request is told to
        # come back, and not refused for good on a guess.
        self.condition = Condition(state="starting", reason="starting", model=model)
        self.settled = asyncio.Event()
        """Set once the first start has succeeded or failed."""
        self._command = command
        self._socket = socket
        self._environment = environment
        self._on_restart = on_restart
        self._on_ready = on_ready
        self._on_stats = on_stats
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to supervise; returns at once."""
        self._task = asyncio.create_task(self._supervise(), name=f"child-{self.name}")

    async def stop(self) -> None:
        """End the engine, by force after `STOP_SECONDS`, and the supervision."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _supervise(self) -> None:
        backoff = BACKOFF_FIRST_SECONDS
        while True:
            began = time.monotonic()
            death = await self._live()
            if time.monotonic() - began >= STABLE_SECONDS:
                backoff = BACKOFF_FIRST_SECONDS
            wait = BACKOFF_CAP_SECONDS if death.usage_error else backoff
            log.error("%s: %s; next start in %.1f s", self.name, death.reason, wait)
            self._become("down", death.reason)
            await asyncio.sleep(wait)
            backoff = min(2 * backoff, BACKOFF_CAP_SECONDS)
            self._on_restart(death.label)

    async def _live(self) -> _Death:
        """Run the engine once, from start to end."""
        self._become("starting", "starting")
        self._socket.unlink(missing_ok=True)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=PIPE,
                env=dict(self._environment),
                # Its own group: Ctrl-C in a terminal must reach the daemon only, which drains.
                start_new_session=True,
            )
        except OSError as error:
            return _Death("exit", f"cannot start {self._command[0]}: {error.strerror}")
        if process.stderr is None:
            raise RuntimeError("a process started with a pipe has none")
        stderr = StderrTail(self.name, process.stderr)
        exited = asyncio.create_task(process.wait(), name=f"exit-{self.name}")
        hung = None
        try:
            hung = await self._until_dead(exited, stderr)
        finally:
            self.condition.state = "down"
            self._on_stats(None)
            await _end(process, exited, grace=0.0 if hung else STOP_SECONDS)
            await stderr.finish()
        return hung or _autopsy(exited.result(), stderr.last_line)

    async def _until_dead(self, exited: "asyncio.Task[int]", stderr: StderrTail) -> _Death | None:
        """Watch a running engine; return None when it has exited, a death when it must be."""
        began = noted = time.monotonic()
        misses = 0
        async with _health_session(self._socket) as session:
            while not exited.done():
                health = await _ask(session, "health", _Health)
                now = time.monotonic()
                if health is not None:
                    misses = 0
                    self._on_stats(await _ask(session, "stats", dict[str, object]))
                    if self.condition.state != "ready":
                        log.info("%s: ready after %.1f s", self.name, now - began)
                        self._ready(health)
                elif self.condition.state == "ready":
                    misses += 1
                    if misses >= HEALTH_FAILURES and not exited.done():
                        return _Death(
                            "unresponsive", f"no answer to {misses} health checks in a row"
                        )
                elif now - noted >= START_NOTE_SECONDS:
                    noted = now
                    log.info(
                        "%s: still starting after %.0f s: %s",
                        self.name,
                        now - began,
                        stderr.last_line or "no message yet",
                    )
                ready = self.condition.state == "ready"
                period = HEALTH_PERIOD_SECONDS if ready else START_POLL_SECONDS
                await asyncio.wait({exited}, timeout=period)
        return None

    def _ready(self, health: _Health) -> None:
        self.condition.model = health.model
        self.condition.context_window = health.context_window
        self.condition.capabilities = frozenset(health.capabilities)
        self._become("ready", "ready")

    def _become(self, state: State, reason: str) -> None:
        self.condition.state = state
        self.condition.reason = reason
        self._on_ready(state == "ready")
        if state != "starting":
            self.settled.set()


def _health_session(socket: Path) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(path=str(socket), force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_SECONDS),
    )


async def _ask(session: aiohttp.ClientSession, page: str, kind: type[T]) -> T | None:
    """Return one of the engine's pages, or None if it does not answer as it should."""
    try:
        async with session.get(f"http://engine/engine/{page}", allow_redirects=False) as response:
            if response.status != 200:
                return None
            return msgspec.json.decode(await response.read(), type=kind)
    except (aiohttp.ClientError, OSError, msgspec.DecodeError):
        return None


async def _end(process: Process, exited: "asyncio.Task[int]", *, grace: float) -> None:
    """End the child and what it has started, politely first if there is a grace (seconds)."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, None)):
        if patience == 0:
            continue
        if not exited.done():
            # The group: an engine that downloads has a child of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            await asyncio.wait({exited}, timeout=patience)


def _autopsy(code: int, last_line: str) -> _Death:
    # Other words follow the reason, after a semicolon.
    words = last_line.removeprefix("error: ").removesuffix(".")
    if code < 0:
        return _Death("signal", f"killed by {_signal_name(-code)}")
    if code == USAGE_EXIT_CODE:
        return _Death("usage", words or f"exit code {code}", usage_error=True)
    return _Death("exit", f"exit code {code}" + (f": {words}" if words else ""))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
