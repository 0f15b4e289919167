"""An engine in a process of its own, from the side of the benchmark that gives it work."""

import json
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from peer_list import PROGRAMS, Peer
from peers.protocol import Times


class Worker:
    """A program that speaks `peers/protocol.py`. Use it as a context manager.

    Between two works the process is stopped, so that no engine spins while another is measured.

    Args:
        python: Its interpreter.
        program: The program.
        model: What it is to load.
        threads: With how many threads it is to compute.
    """

    def __init__(self, python: Path, program: Path, model: str, threads: int) -> None:
        self._command = [str(python), str(program), model, str(threads)]
        self._stack = ExitStack()
        self.engine = ""

    @classmethod
    def ours(cls, model: str, threads: int) -> Self:
        """Return our own edge engine."""
        return cls(Path(sys.executable), PROGRAMS / "tidegate_worker.py", model, threads)

    @classmethod
    def of(cls, peer: Peer, threads: int) -> Self:
        """Return a peer."""
        return cls(peer.python, peer.program, str(peer.model), threads)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            self._process = stack.enter_context(
                subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                )
            )
            stack.callback(self._process.kill)
            self.engine = self._answer()["engine"]
            self._process.send_signal(signal.SIGSTOP)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(self, prompts: list[list[int]], max_tokens: int) -> Times:
        """Generate after each prompt, all at once; return when each token was there."""
        self._process.send_signal(signal.SIGCONT)
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        pipe.flush()
        times: Times = self._answer()["times"]
        self._process.send_signal(signal.SIGSTOP)
        return times

    def rss_bytes(self) -> int:
        """Return the process's resident memory."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def _answer(self) -> dict[str, Any]:
        pipe = self._process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")
            raise RuntimeError(f"{self._command[1]} ended; it said:\n{said}")
        answer: dict[str, Any] = json.loads(line)
        return answer
