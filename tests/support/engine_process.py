"""A real engine process on a UNIX socket, for tests."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx


class EngineProcess:
    """`python -m MODULE serve …` as a child, its stdin a lifeline.

    Args:
        module: `edge_engine`, `cloud_engine` or `engine_core.fake_engine`.
        options: Further arguments of `serve`.
        uds: Path of the socket.
        prefix: A command that becomes the one that follows it.
    """

    def __init__(
        self, module: str, options: Sequence[str], uds: Path, prefix: Sequence[str] = ()
    ) -> None:
        self.uds = uds
        command = [*prefix, sys.executable, "-m", module, "serve", "--uds", str(uds)]
        self.process = subprocess.Popen(
            [*command, "--lifeline", *options],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._log: list[bytes] = []
        # Read all the time, or the pipe fills and the engine stands still.
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://engine", timeout=60
        )

    def wait_until_ready(self, seconds: float = 180) -> None:
        """Return once the engine accepts connections, which it does when it can answer."""
        deadline = time.monotonic() + seconds
        while not accepts(self.uds):
            assert self.process.poll() is None, f"the engine ended: {self.log()}"
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine is not ready after {seconds} s: {self.log()}")
            time.sleep(0.02)

    def wait_until_idle(self, seconds: float = 1.0) -> float:
        """Return the seconds until stats show that nothing runs or waits."""
        began = time.monotonic()
        while (took := time.monotonic() - began) < seconds:
            stats = self.stats()
            if stats["running"] == stats["waiting"] == 0:
                return took
            time.sleep(0.01)
        raise TimeoutError(f"still busy after {seconds} s: {self.stats()}")

    def stats(self) -> dict[str, Any]:
        """Return the stats page."""
        stats: dict[str, Any] = self.http.get("/engine/stats").json()
        return stats

    def log(self) -> str:
        """Return what the engine has written to stderr."""
        return b"".join(self._log).decode(errors="replace")

    def wait(self, seconds: float = 10) -> int:
        """Return the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def close(self) -> None:
        """End the process however it is, and free what belongs to it here."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_log(self) -> None:
        pipe = self.process.stderr
        while pipe is not None and (line := pipe.readline()):
            self._log.append(line)


def accepts(uds: Path) -> bool:
    """Return whether somebody listens on a UNIX socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(uds)) == 0


@contextlib.contextmanager
def engine_process(
    module: str, *options: str, prefix: Sequence[str] = ()
) -> Iterator[EngineProcess]:
    """Start an engine; end it on every path. It may not be ready yet."""
    # A short path of its own: socket paths are limited to about 100 characters.
    with tempfile.TemporaryDirectory(prefix="tg") as folder:
        engine = EngineProcess(module, options, Path(folder) / "engine.sock", prefix)
        try:
            yield engine
        finally:
            engine.close()
