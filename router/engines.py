"""Child engines as the configuration describes them: their command and their environment."""

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from router.config import TargetConfig

_MODULES = {"edge": "edge_engine", "cloud": "cloud_engine", "fake": "engine_core.fake_engine"}
_CLEANUP_SECONDS = 3.0
"""What an interrupted builder gets to clear away what it has half done."""


def serve_command(target: TargetConfig, socket: Path) -> list[str]:
    """Return the command that serves a target's engine on `socket` and dies with us."""
    if target.engine is None:
        raise ValueError("an upstream has no engine to start")
    command = [sys.executable, "-m", _MODULES[target.engine], "serve"]
    command += ["--model", target.model, "--uds", str(socket), "--lifeline"]
    command += ["--max-waiting", str(target.max_waiting)]
    if target.context is not None:
        command += ["--context", str(target.context)]
    if target.threads is not None:
        command += ["--threads", str(target.threads)]
    if target.slots is not None:
        command += ["--slots", str(target.slots)]
    if target.kv_memory is not None:
        command += ["--kv-memory", str(target.kv_memory)]
    if target.step_memory is not None:
        command += ["--step-memory", str(target.step_memory)]
    if target.engine == "edge":
        command += ["--kv", target.kv]
    if target.engine == "cloud":
        command += ["--device", target.device, "--dtype", target.dtype]
        command += ["--weights", target.weights, "--graphs", target.graphs]
        command += ["--ladder", str(target.ladder)]
        if target.max_running is not None:
            command += ["--max-running", str(target.max_running)]
    return command


def build_command(model: str, precision: str = "int8", kv: str = "float32") -> list[str]:
    """Return the command that builds the edge engine's graph of a model, with a progress bar."""
    command = [sys.executable, "-m", _MODULES["edge"], "build", "--lifeline"]
    return [*command, "--model", model, "--precision", precision, "--kv", kv]


def run_build(
    model: str, precision: str = "int8", kv: str = "float32", *, stdout: int | None = None
) -> int:
    """Run that command; return its exit code. What is wrong is on stderr.

    Args:
        model: Its name.
        precision: `int8` or `fp32`.
        kv: What keys and values are kept in, `float32` or `int8`.
        stdout: Where the built folder's path is printed, as `subprocess` takes it.
    """
    # The pipe is the builder's lifeline: it ends with us, however we end.
    with subprocess.Popen(
        build_command(model, precision, kv), stdin=subprocess.PIPE, stdout=stdout
    ) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal has interrupted the builder as well, which says what it keeps.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CLEANUP_SECONDS)
            raise


def engine_environment(
    environment: Mapping[str, str], targets: Iterable[TargetConfig]
) -> dict[str, str]:
    """Return the environment for children: ours without the keys of upstreams."""
    keys = {target.key_env for target in targets}
    return {name: value for name, value in environment.items() if name not in keys}
