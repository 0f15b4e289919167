"""Packages for tests of another environment than this one, in folders that are kept between runs."""

import subprocess
import sys
from pathlib import Path

import pytest


def pip_folder(request: pytest.FixtureRequest, requirement: str, *options: str) -> Path:
    """Return a folder with a package; skip where it cannot be had.

    Args:
        request: Of the fixture that asks.
        requirement: Name and version, `name==1.2.3`.
        options: Further ones of `pip install`.
    """
    folder = request.config.cache.mkdir(requirement.replace("==", "-"))
    complete = folder / "complete"
    if complete.exists():
        return folder
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", *options]
    done = subprocess.run(
        [*command, "--target", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"{requirement} cannot be installed here: {reason}")
    complete.touch()
    return folder
