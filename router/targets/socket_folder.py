"""The private folder of the engines' UNIX sockets."""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine_core.errors import TidegateError

MAX_PATH_BYTES = 107
"""Longest path of a UNIX socket on Linux (`sun_path` has 108 bytes with its NUL)."""
_PREFIX = "tidegate-"
_FOLDER = re.compile(_PREFIX + r"[a-z0-9_]{8}")
"""The names that `mkdtemp` gives."""
_SOCKET = re.compile(r"\d+\.sock")


@contextmanager
def socket_folder(environment: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Make a folder that only this user can enter, and remove it afterwards.

    It lies below systemd's `RUNTIME_DIRECTORY`, else `XDG_RUNTIME_DIR`, else the folder for
    temporary files. What killed daemons have left there goes first.

    Raises:
        TidegateError: the folder cannot be made, or its path is too long for a socket.
    """
    base = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
    base = base or environment.get("XDG_RUNTIME_DIR", "") or tempfile.gettempdir()
    _sweep(Path(base))
    try:
        folder, lock = _make(base)
    except OSError as error:
        raise TidegateError(
            f"cannot make a folder for engine sockets in {base}: {error.strerror}; set "
            "XDG_RUNTIME_DIR to a folder that this user may write"
        ) from None
    try:
        if len(os.fsencode(socket_path(folder, 0))) + 4 > MAX_PATH_BYTES:
            raise TidegateError(
                f"{base} is too long a path for UNIX sockets; set XDG_RUNTIME_DIR to a shorter one"
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def socket_path(folder: Path, number: int) -> Path:
    """Return the socket of the target with this number; a name may be too long or hold a slash."""
    return folder / f"{number}.sock"


def _make(base: str) -> tuple[Path, int]:
    """Return a new folder and a descriptor of it; its lock says that the folder has an owner.

    The kernel lets go of the lock when the process ends, however that is.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        # A daemon that starts at this moment may take it for a left-over one, until it is locked.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.path.samestat(folder.stat(), os.fstat(lock)):
                    return folder, lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)


def _sweep(base: Path) -> None:
    """Remove the folders of daemons that are gone. What we did not put there is never touched."""
    with contextlib.suppress(OSError):
        for folder in base.iterdir():
            if _FOLDER.fullmatch(folder.name):
                with contextlib.suppress(OSError):  # gone already, or not ours to read
                    _remove_if_left_over(folder)


def _remove_if_left_over(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        info = os.fstat(descriptor)
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) != stat.S_IRWXU:
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with os.scandir(descriptor) as scan:
            entries = list(scan)
        if not all(map(_is_socket, entries)):
            return
        for entry in entries:
            os.unlink(entry.name, dir_fd=descriptor)
        folder.rmdir()
    finally:
        os.close(descriptor)


def _is_socket(entry: os.DirEntry[str]) -> bool:
    mode = entry.stat(follow_symlinks=False).st_mode
    return _SOCKET.fullmatch(entry.name) is not None and stat.S_ISSOCK(mode)
