"""A real `tidegate serve` as a child process of a test."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 240.0
"""A first start builds the edge graph, on a machine that may be busy with other tests."""


@dataclass
class DaemonProcess:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def readyz(self) -> dict[str, Any]:
        """Return the readiness document, whatever its status."""
        return json.loads(self._get("/readyz"))

    def wait_ready(self, *targets: str, seconds: float = START_SECONDS) -> None:
        """Wait until these targets, or all, are ready."""
        end = time.monotonic() + seconds
        while True:
            states = {n: t["state"] for n, t in self.readyz()["targets"].items()}
            if all(states[name] == "ready" for name in targets or states):
                return
            assert time.monotonic() < end, f"{states}\n{self.log.read_text()}"
            time.sleep(0.05)

    def metric(self, line: str) -> float:
        """Return the sum of the samples that start with this text."""
        rows = self._get("/metrics").decode().splitlines()
        return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith(line))

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read()

    def engine(self, module: str) -> psutil.Process:
        """Return the engine process that runs this module."""
        (found,) = [p for p in self.engines() if module in p.cmdline()]
        return found

    def engines(self) -> list[psutil.Process]:
        """Return all engine processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, seconds: float = 20) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def daemon(folder: Path, targets: str, more: str = "") -> Iterator[DaemonProcess]:
    """Run a daemon on a free port; it is killed at the end if the test has not stopped it.

    Args:
        folder: For its configuration and its log.
        targets: YAML below `targets:`, indented by two.
        more: More top-level YAML.
    """
    config = folder / "config.yaml"
    config.write_text(f"listen:\n  port: 0\n{more}\ntargets:\n{targets}\n", encoding="utf-8")
    log = folder / "daemon.log"
    command = [sys.executable, "-m", "router.cli", "serve", "--config", str(config)]
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            yield DaemonProcess(process, _url(process, log), log)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(45)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + 30
    while not (found := re.search(r"listening on (\S+);", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    return found.group(1)
