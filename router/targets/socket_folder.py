"""The private folder of the engines' UNIX sockets."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine_core.errors import TidegateError

MAX_PATH_BYTES = 107
"""Longest path of a UNIX socket on Linux (`sun_path` has 108 bytes with its NUL)."""


@contextmanager
def socket_folder(environment: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Make a folder that only this user can enter, and remove it afterwards.

    It lies below systemd's `RUNTIME_DIRECTORY`, else `XDG_RUNTIME_DIR`, else the folder for
    temporary files.

    Raises:
        TidegateError: the folder cannot be made, or its path is too long for a socket.
    """
    base = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
    base = base or environment.get("XDG_RUNTIME_DIR", "") or tempfile.gettempdir()
    try:
        folder = Path(tempfile.mkdtemp(prefix="tidegate-", dir=base))
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


def socket_path(folder: Path, number: int) -> Path:
    """Return the socket of the target with this number; a name may be too long or hold a slash."""
    return folder / f"{number}.sock"
