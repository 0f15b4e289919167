"""Engine sockets lie in a private folder that goes away."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core.errors import TidegateError
from router.targets import socket_folder as socket_folder_module
from router.targets.socket_folder import socket_folder, socket_path


@pytest.mark.parametrize("variable", ["RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"])
def test_it_lies_where_the_system_says_and_is_private(tmp_path: Path, variable: str) -> None:
    with socket_folder({variable: str(tmp_path)}) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        socket_path(folder, 0).touch()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_base_is_said_with_what_to_set(tmp_path: Path) -> None:
    with (
        pytest.raises(TidegateError, match="XDG_RUNTIME_DIR"),
        socket_folder({"XDG_RUNTIME_DIR": str(tmp_path / "none")}),
    ):
        pass


def test_a_path_too_long_for_a_socket_is_refused_and_nothing_left(tmp_path: Path) -> None:
    base = tmp_path / ("x" * 100)
    base.mkdir()
    with (
        pytest.raises(TidegateError, match="too long"),
        socket_folder({"XDG_RUNTIME_DIR": str(base)}),
    ):
        pass
    assert list(base.iterdir()) == []


def leave_socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(socket_path(folder, 0)))


def test_what_a_killed_daemon_left_is_swept_at_the_next_start(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from router.targets.socket_folder import socket_folder\n"
        f"with socket_folder({{'XDG_RUNTIME_DIR': {str(tmp_path)!r}}}) as folder:\n"
        "    print(folder, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        folder = Path(killed.stdout.readline().strip())
        leave_socket(folder)
        with socket_folder({"XDG_RUNTIME_DIR": str(tmp_path)}):
            assert folder.exists(), "its owner lives"
        killed.send_signal(signal.SIGKILL)
    with socket_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_folders_of_daemons_that_run_side_by_side_stay(tmp_path: Path) -> None:
    with socket_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) as first:
        leave_socket(first)
        with socket_folder({"XDG_RUNTIME_DIR": str(tmp_path)}):
            assert socket_path(first, 0).exists()


@pytest.mark.parametrize(
    ("name", "inside", "mode"),
    [
        ("tidegate-abcdefgh", "notes.txt", 0o700),
        ("tidegate-abcdefgh", "0.sock", 0o700),  # a plain file
        ("tidegate-abcdefgh", None, 0o755),
        ("tidegate-source", None, 0o700),
        ("elsewhere", None, 0o700),
    ],
)
def test_what_no_daemon_made_is_never_touched(
    tmp_path: Path, name: str, inside: str | None, mode: int
) -> None:
    folder = tmp_path / name
    folder.mkdir(mode=mode)
    folder.chmod(mode)
    if inside is not None:
        (folder / inside).touch()
    (tmp_path / "tidegate-linklink").symlink_to(folder)
    with socket_folder({"XDG_RUNTIME_DIR": str(tmp_path)}):
        pass
    assert folder.exists()
    assert inside is None or (folder / inside).exists()
    assert (tmp_path / "tidegate-linklink").is_symlink()


def test_a_folder_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def fake_mkdtemp(**options: str) -> str:
        folder = Path(options["dir"]) / f"tidegate-{len(made)}"
        folder.mkdir()
        made.append(folder)
        return str(folder)

    lock = socket_folder_module.fcntl.flock

    def fake_flock(descriptor: int, operation: int) -> None:
        if len(made) == 1:
            made[0].rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(socket_folder_module.tempfile, "mkdtemp", fake_mkdtemp)
    monkeypatch.setattr(socket_folder_module.fcntl, "flock", fake_flock)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with socket_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) as folder:
        assert folder == made[1]
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
