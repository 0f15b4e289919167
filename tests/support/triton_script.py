"""Scripts that need Triton: it reads its switches when it is imported, so each is a process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_triton_script(script: str, folder: Path, **environment: str) -> None:
    """Run a script under these variables, `TRITON_INTERPRET="1"` for the interpreter.

    Skips the test where Triton is not installed, and fails it if the script fails.

    Args:
        script: The text of it.
        folder: An empty one, for the script and what Triton compiles.
        environment: What is set beside the variables of this process.
    """
    if not importlib.util.find_spec("triton"):
        pytest.skip("triton is not installed")
    path = folder / "script.py"
    path.write_text(script, "utf-8")
    done = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"TRITON_CACHE_DIR": str(folder / "triton")} | environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
