"""The daemon as a process: start, drain, stop, and what it never leaves behind."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
from daemon_process import DaemonProcess, daemon
from fake_upstream import DONE, HELLO, ROLE, STOP, chunk, completion, fake_upstream, reply, sse

FAKES = """
  edge: {tier: edge, engine: fake, model: small}
  cloud: {tier: cloud, engine: fake, model: big}
"""


def upstream_target(url: str, *more: str) -> str:
    return f"  remote: {{tier: edge, url: '{url}', model: m{''.join(', ' + m for m in more)}}}"


async def ask(url: str, text: str = "hi", *, model: str = "auto", stream: bool = False) -> bytes:
    body = {"model": model, "stream": stream, "messages": [{"role": "user", "content": text}]}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        return await response.read()


async def wait_requests(run: DaemonProcess, count: int) -> None:
    async with asyncio.timeout(5):
        while await asyncio.to_thread(run.metric, "tidegate_in_flight") < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_daemon_answers_announces_itself_and_cleans_up(tmp_path: Path) -> None:
    with daemon(tmp_path, FAKES) as run:
        run.wait_ready()
        assert b"hi" in asyncio.run(ask(run.url))
        engines = run.engines()
        assert len(engines) == 2
        (folder,) = {Path(p.cmdline()[p.cmdline().index("--uds") + 1]).parent for p in engines}
        assert folder.stat().st_mode & 0o777 == 0o700
        assert run.stop() == 0
        log = run.log.read_text()
    assert not [p for p in engines if p.is_running()]
    assert not folder.exists()
    assert f"Tidegate answers at {run.url}/v1" in log
    curl = re.search(r"-d '(.*)'", log)
    assert curl is not None
    assert json.loads(curl.group(1))["model"] == "auto"
    assert "Traceback" not in log


def test_a_killed_engine_is_replaced_and_counted_while_requests_go_on(tmp_path: Path) -> None:
    with daemon(tmp_path, FAKES) as run:
        run.wait_ready()
        edge = next(p for p in run.engines() if "small" in p.cmdline())
        edge.kill()
        for _ in range(20):
            assert b"hi" in asyncio.run(ask(run.url))
        run.wait_ready(seconds=20)
        assert run.metric('tidegate_engine_restarts_total{reason="signal",target="edge"}') == 1
        assert run.metric('tidegate_engine_up{target="edge"}') == 1


def test_where_nothing_can_start_it_says_so_and_why_and_lives_on(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("no model")
    with daemon(tmp_path, "  edge: {tier: edge, engine: edge, model: m.gguf}") as run:
        deadline = time.monotonic() + 60
        while "nothing can answer at" not in (log := run.log.read_text()):
            assert time.monotonic() < deadline, log
            time.sleep(0.05)
        assert run.readyz()["targets"]["edge"]["state"] == "down"
        assert run.stop() == 0
        log = run.log.read_text()
    assert re.search(r"^  edge \(edge, .*m\.gguf\): .*m\.gguf", log, re.MULTILINE)
    assert "Tidegate answers" not in log
    assert "Try it" not in log
    assert ".;" not in log


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_daemon_leaves_no_engine(tmp_path: Path, stopped: bool) -> None:
    with daemon(tmp_path, FAKES) as run:
        run.wait_ready()
        engines = run.engines()
        if stopped:
            engines[0].suspend()
        run.process.kill()
        _, alive = psutil.wait_procs(engines, timeout=5)
        assert alive == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_stop_signal_lets_a_running_stream_finish(
    tmp_path: Path, number: signal.Signals
) -> None:
    slow = sse(ROLE, HELLO, 1.0, chunk({"content": "!"}), STOP, DONE)
    async with fake_upstream(slow) as upstream:
        with daemon(tmp_path, upstream_target(upstream.url)) as run:
            answer = asyncio.create_task(ask(run.url, stream=True))
            await wait_requests(run, 1)
            run.process.send_signal(number)
            await asyncio.sleep(0.3)
            with pytest.raises(aiohttp.ClientConnectorError):
                await ask(run.url)
            assert (await answer).endswith(DONE)
            assert await asyncio.to_thread(run.process.wait, 5) == 0


@pytest.mark.parametrize(("drain", "signals"), [(0.5, 1), (60, 2)])
async def test_a_drain_that_is_over_or_hurried_cuts_streams_with_an_error(
    tmp_path: Path, drain: float, signals: int
) -> None:
    async with fake_upstream(sse(ROLE, HELLO, 60.0)) as upstream:
        with daemon(tmp_path, upstream_target(upstream.url), f"drain_seconds: {drain}") as run:
            answer = asyncio.create_task(ask(run.url, stream=True))
            await wait_requests(run, 1)
            began = time.monotonic()
            for _ in range(signals):
                run.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
            body = await asyncio.wait_for(answer, 5)
            assert b'"draining"' in body
            assert b"[DONE]" not in body
            assert await asyncio.to_thread(run.process.wait, 5) == 0
            assert time.monotonic() - began < 5


async def test_a_key_goes_to_its_upstream_only_and_never_to_logs_or_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-secret")
    async with fake_upstream(reply(completion())) as upstream:
        targets = upstream_target(upstream.url, "key_env: UPSTREAM_KEY")
        targets += "\n  local: {tier: edge, engine: fake, model: small}"
        with daemon(tmp_path, targets) as run:
            await asyncio.to_thread(run.wait_ready)
            async with aiohttp.ClientSession() as session:
                body = {"model": "remote", "messages": [{"role": "user", "content": "hi"}]}
                headers = {"Authorization": "Bearer client-secret"}
                url = f"{run.url}/v1/chat/completions"
                async with session.post(url, json=body, headers=headers) as response:
                    assert response.status == 200
            assert upstream.requests[0][1]["authorization"] == "Bearer sk-secret"
            (engine,) = run.engines()
            assert "UPSTREAM_KEY" not in engine.environ()
            assert "secret" not in run.log.read_text()


def serve(config: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "router.cli", "serve", "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_port_in_use_is_said_plainly(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config.write_text(f"listen:\n  port: {taken.getsockname()[1]}\ntargets:{FAKES}")
        done = serve(config)
    assert done.returncode == 2
    assert "is in use" in done.stderr
    assert "listen.port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_key_is_said_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"targets:\n{upstream_target('http://127.0.0.1:9/v1', 'key_env: NOT_SET')}")
    done = serve(config)
    assert done.returncode == 2
    assert "NOT_SET" in done.stderr
    assert "listening" not in done.stderr


def test_a_wrong_configuration_is_said_with_its_line(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("listen:\n  prot: 1\n")
    done = serve(config)
    assert done.returncode == 2
    assert "c.yaml:2" in done.stderr
