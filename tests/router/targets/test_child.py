"""The supervisor keeps one engine process alive, and never leaves one behind."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from router.targets import child as child_module
from router.targets.child import ChildEngine
from router.targets.client import UpstreamClient

FAKE = [sys.executable, "-m", "engine_core.fake_engine", "serve", "--model", "fake", "--lifeline"]


@dataclass
class Watched:
    child: ChildEngine
    socket: Path
    restarts: list[str]
    ready: list[bool]
    stats: list[Mapping[str, object] | None]

    def process(self) -> psutil.Process:
        """Return the engine's process."""
        (found,) = [
            p
            for p in psutil.Process().children(recursive=True)
            if str(self.socket) in " ".join(p.cmdline())
        ]
        return found


@asynccontextmanager
async def supervised(
    folder: Path, *options: str, command: list[str] | None = None
) -> AsyncIterator[Watched]:
    socket = folder / "0.sock"
    restarts: list[str] = []
    ready: list[bool] = []
    stats: list[Mapping[str, object] | None] = []
    watched = Watched(
        ChildEngine(
            name="edge",
            model="fake",
            command=[*(command or FAKE), "--uds", str(socket), *options],
            socket=socket,
            environment=dict(os.environ),
            on_restart=restarts.append,
            on_ready=ready.append,
            on_stats=stats.append,
        ),
        socket,
        restarts,
        ready,
        stats,
    )
    watched.child.start()
    try:
        yield watched
    finally:
        await watched.child.stop()


async def until(condition: Callable[[], bool], seconds: float = 15) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - a process sets no event
            await asyncio.sleep(0.02)


async def test_it_becomes_ready_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with supervised(tmp_path) as watched:
        await until(lambda: watched.child.condition.state == "ready")
        process = watched.process()
        condition = watched.child.condition
        assert condition.model == "fake"
        assert condition.context_window == 4096
        assert condition.capabilities == {"logit_bias", "logprobs", "n", "tools"}
        body = b'{"model":"fake","messages":[{"role":"user","content":"ping"}]}'
        async with UpstreamClient("http://engine/v1", socket=watched.socket) as client:
            assert b"ping" in await client.fetch("/chat/completions", body, 1)
    assert not process.is_running()
    assert watched.restarts == []
    assert watched.ready == [False, True]
    assert watched.stats[0] is not None
    assert watched.stats[0]["model"] == "fake"
    assert watched.stats[-1] is None


async def test_a_killed_engine_is_down_at_once_and_comes_back(tmp_path: Path) -> None:
    async with supervised(tmp_path) as watched:
        condition = watched.child.condition
        await until(lambda: condition.state == "ready")
        watched.process().kill()
        await until(lambda: condition.state == "down", 1)
        await until(lambda: "SIGKILL" in condition.reason, 2)
        await until(lambda: condition.state == "ready")
    assert watched.restarts == ["signal"]


async def test_an_engine_that_hangs_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "HEALTH_PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(child_module, "HEALTH_TIMEOUT_SECONDS", 0.3)
    async with supervised(tmp_path) as watched:
        condition = watched.child.condition
        await until(lambda: condition.state == "ready")
        first = watched.process()
        first.suspend()
        await until(lambda: condition.state == "down")
        await until(lambda: condition.state == "ready")
        assert not first.is_running()
    assert watched.restarts == ["unresponsive"]


async def test_a_wrong_option_is_told_in_the_engines_own_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with supervised(tmp_path, "--context", "nonsense") as watched:
        await asyncio.wait_for(watched.child.settled.wait(), 15)
        assert watched.child.condition.state == "down"
        assert "--context" in watched.child.condition.reason
    assert "edge | " in capfd.readouterr().err


async def test_what_a_person_must_fix_is_tried_again_only_at_the_longest_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_CAP_SECONDS", 0.2)
    command = [
        sys.executable,
        "-c",
        "import sys; print('error: no model. Fetch it.', file=sys.stderr); sys.exit(2)",
    ]
    async with supervised(tmp_path, command=command) as watched:
        await until(lambda: len(watched.restarts) >= 2)
        assert watched.child.condition.state in ("down", "starting")
    assert set(watched.restarts) == {"usage"}
    assert "edge: no model. Fetch it; next start in 0.2 s" in caplog.text


async def test_restarts_slow_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_FIRST_SECONDS", 0.1)
    times: list[float] = []
    command = ["/bin/false"]
    async with supervised(tmp_path, command=command) as watched:
        watched.child._on_restart = lambda _reason: times.append(time.monotonic())
        await until(lambda: len(times) >= 4)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps[0] >= 0.2
    assert gaps[1] >= 0.4
    assert gaps[2] >= 0.8


async def test_a_program_that_is_not_there_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    async with supervised(tmp_path, command=["/no/such/program"]) as watched:
        await asyncio.wait_for(watched.child.settled.wait(), 5)
        assert "/no/such/program" in watched.child.condition.reason


async def test_an_engine_deaf_to_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "STOP_SECONDS", 0.3)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", f"import sys; sys.stdout = sys.stderr; {code}"]
    async with supervised(tmp_path, command=command) as watched:
        await asyncio.sleep(0.5)
        process = watched.process()
    assert not process.is_running()


async def test_stopping_during_a_long_start_ends_the_engine(tmp_path: Path) -> None:
    async with supervised(tmp_path, "--start-delay", "60") as watched:
        await asyncio.sleep(0.5)
        process = watched.process()
        assert watched.child.condition.state == "starting"
        assert watched.child.condition.capabilities is None  # not known yet
    assert not process.is_running()


def test_no_engine_outlives_a_daemon_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, os
from pathlib import Path
from router.targets.child import ChildEngine
async def main():
    socket = Path({str(tmp_path)!r}) / "0.sock"
    child = ChildEngine(name="edge", model="fake", command={FAKE!r} + ["--uds", str(socket)], socket=socket,
        environment=dict(os.environ), on_restart=print, on_ready=lambda up: None,
        on_stats=lambda stats: None)
    child.start()
    await child.settled.wait()
    print("up", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"up\n"
        (engine,) = psutil.Process(daemon.pid).children()
        daemon.send_signal(signal.SIGKILL)
    engine.wait(5)
