"""An engine as a process: socket, signals, lifeline, exit codes."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from engine_process import accepts, engine_process

FAKE = "engine_core.fake_engine"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x" * 500}]}


def run_to_end(*options: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", FAKE, "serve", "--model", "fake", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return result.returncode, result.stderr


@contextlib.contextmanager
def served_without_lifeline(uds: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the fake engine with a closed stdin until it answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", FAKE, "serve", "--model", "fake", "--uds", str(uds)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while not accepts(uds):
            assert time.monotonic() < deadline, "the engine never answered"
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        assert process.wait(10) == 0


def test_malformed_http_is_logged_without_its_bytes() -> None:
    with engine_process(FAKE, "--model", "fake") as engine:
        engine.wait_until_ready()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(engine.uds))
            client.sendall(b"GET /secret\x01 HTTP/1.1\r\nAuthorization: sk-secret\r\n\r\n")
            assert b" 400 " in client.recv(4096)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait() == 0
        assert "malformed HTTP" in engine.log()
        assert "secret" not in engine.log()


def test_socket_belongs_to_its_owner_alone_and_is_removed_at_the_end() -> None:
    with engine_process(FAKE, "--model", "fake") as engine:
        engine.wait_until_ready()
        assert stat.S_IMODE(engine.uds.stat().st_mode) == 0o600
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait() == 0
        assert not engine.uds.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_an_open_stream_with_an_error_frame_and_exits_zero(
    number: signal.Signals,
) -> None:
    with engine_process(FAKE, "--model", "fake", "--token-delay-ms", "10") as engine:
        engine.wait_until_ready()
        with engine.http.stream(
            "POST", "/v1/chat/completions", json=CHAT | {"stream": True}
        ) as response:
            lines = response.iter_lines()
            next(lines)
            began = time.monotonic()
            engine.process.send_signal(number)
            rest = list(lines)
        assert any('"code":"draining"' in line for line in rest)
        assert "data: [DONE]" not in rest
        assert engine.wait() == 0
        assert time.monotonic() - began < 3


def test_signal_while_loading_ends_at_once_with_exit_zero() -> None:
    with engine_process(FAKE, "--model", "fake", "--start-delay", "60") as engine:
        while not engine.uds.exists():
            time.sleep(0.02)
        began = time.monotonic()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait() == 0
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("start_delay", ["0", "60"])
def test_end_of_the_lifeline_ends_the_process_in_every_phase(start_delay: str) -> None:
    with engine_process(FAKE, "--model", "fake", "--start-delay", start_delay) as engine:
        if start_delay == "0":
            engine.wait_until_ready()
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        # While the interpreter still starts up, the signal finds no handler yet.
        assert engine.wait() in (0, -signal.SIGTERM)


def test_without_the_option_a_closed_stdin_changes_nothing(tmp_path: Path) -> None:
    with served_without_lifeline(tmp_path / "s") as process:
        assert process.poll() is None


def test_socket_left_by_a_killed_process_is_replaced() -> None:
    with engine_process(FAKE, "--model", "fake") as engine:
        engine.wait_until_ready()
        engine.process.kill()
        engine.wait()
        assert engine.uds.exists()
        with served_without_lifeline(engine.uds):
            assert engine.http.get("/engine/health").status_code == 200


def test_socket_of_a_living_engine_is_not_taken_over() -> None:
    with engine_process(FAKE, "--model", "fake") as engine:
        engine.wait_until_ready()
        code, message = run_to_end("--uds", str(engine.uds))
        assert code == 2
        assert message.startswith("error: cannot listen on")
        assert "another engine is listening there" in message
        assert engine.stats()["model"] == "fake"


@pytest.mark.parametrize("address", ["localhost:0", "127.0.0.1:0", "[::1]:0"])
def test_loopback_tcp_is_served(address: str) -> None:
    if address.startswith("[") and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    process = subprocess.Popen(
        [sys.executable, "-m", FAKE, "serve", "--model", "fake", "--tcp", address],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        ready = process.stderr.readline()
        where = ready.strip().partition(" at=")[2]
        port = where.rpartition(":")[2]
        host = address.rpartition(":")[0]
        assert httpx.get(f"http://{host}:{port}/engine/health").json()["model"] == "fake"
    finally:
        process.terminate()
        assert process.wait(10) == 0
        process.stderr.close()


def test_of_two_engines_that_load_for_one_port_one_serves_and_one_says_why_it_ends() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", FAKE, "serve", "--model", "fake", "--start-delay", "1"]
    engines = [
        subprocess.Popen(
            [*command, "--tcp", f"localhost:{port}"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    deadline = time.monotonic() + 30
    while not (ended := [engine for engine in engines if engine.poll() is not None]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert httpx.get(f"http://localhost:{port}/engine/health").json()["model"] == "fake"
    for engine in engines:
        engine.terminate()
        _, message = engine.communicate(timeout=10)
        if engine in ended:
            assert engine.returncode == 2
            assert message.startswith("error: cannot listen on 127.0.0.1:")
        else:
            assert engine.returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tcp", "0.0.0.0:8000"), "not a loopback address"),
        (("--tcp", "8000"), "not HOST:PORT"),
        (("--tcp", "127.0.0.1:99999"), "not HOST:PORT"),
        ((), "one of the arguments --uds --tcp is required"),
        (("--uds", "/nonexistent/folder/s"), "No such file or directory"),
        (("--uds", "s" * 200), "too long"),
        (("--uds", "s", "--context", "0"), "less than 1"),
        (("--uds", "s", "--unknown"), "unrecognized arguments"),
    ],
)
def test_wrong_options_exit_with_two_and_say_why(options: tuple[str, ...], words: str) -> None:
    code, message = run_to_end(*options)
    assert code == 2
    assert words in message
    assert "Traceback" not in message


def test_signal_during_a_download_or_build_runs_its_clean_up() -> None:
    command = (
        "import time\n"
        "from engine_core.process import run_command\n"
        "def work():\n"
        "    try:\n"
        "        print('working', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('cleaned up')\n"
        "raise SystemExit(run_command(work))\n"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"working\n"
            process.send_signal(number)
            assert process.stdout.read() == b"cleaned up\n"
            assert process.wait(10) == 128 + number


def test_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    code, message = run_to_end("--uds", str(path))
    assert (code, path.read_text()) == (2, "data")
    assert "cannot listen on" in message


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return os.name == "posix"
