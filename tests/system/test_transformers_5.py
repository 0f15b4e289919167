"""The cloud engine on the newest transformers, which other tests run on 4.57."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pip_folder import pip_folder

VERSION = "5.24.0"
"""`constraints.txt` cannot hold it: optimum-onnx, of the same environment, wants 4.57."""
ROOT = Path(__file__).parents[2]
SUITES = {
    "cloud_engine": ("tests/cloud_engine", "-m", "not slow"),
    "contract": ("tests/contract", "-k", "cloud"),
    "batch_invariance": ("tests/cloud_engine/test_batch_invariance.py",),
    # transformers 5 brings huggingface_hub 2 along, which does not let one interruption end a pull.
    "hub_model": ("tests/engine_core/test_hub_model.py", "-k", "not interrupted"),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def newest(request: pytest.FixtureRequest) -> Path:
    """Return a folder with the package and what it depends on, kept between runs: 280 MB."""
    return pip_folder(request, f"transformers=={VERSION}")


def run(newest: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the newest packages are found before those of this environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(newest)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )


def test_the_newest_transformers_is_the_one_that_is_used(newest: Path) -> None:
    done = run(newest, "-c", "import transformers; print(transformers.__version__)")
    assert done.stdout.strip() == VERSION, done.stderr


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_passes_on_the_newest_transformers(newest: Path, suite: str) -> None:
    done = run(newest, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITES[suite])
    assert done.returncode == 0, done.stdout[-10_000:]
