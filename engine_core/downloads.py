"""What every download shares: room on the disk, plain words for a full one, progress, durability."""

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Never

from tqdm import tqdm

from engine_core.errors import ModelError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_room(folder: Path, needed: int) -> None:
    """Check that `needed` bytes fit where `folder` lies.

    Raises:
        ModelError: they do not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise full_disk(folder, needed, free)


def full_disk(folder: Path, needed: int | None = None, free: int | None = None) -> ModelError:
    """Return the error for a disk on which `needed` bytes, if that is known, do not fit."""
    need = "nothing more fits" if needed is None else f"the model needs {needed / 1e6:,.0f} MB"
    have = "" if free is None else f" and {free / 1e6:,.0f} MB are free"
    return ModelError(
        f"The disk is full: {need} in {folder}{have}. Free some space, or set XDG_CACHE_HOME to a "
        "folder on a larger disk."
    )


def is_full_disk(error: BaseException | None) -> bool:
    """Return whether an error, or what it came from, is a full disk or quota."""
    seen = 0
    while error is not None and seen < 10:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


@contextmanager
def plain_disk_errors(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turn what a disk may answer inside the block into a `ModelError`.

    Args:
        folder: Where the block writes.
        needed: Bytes that it writes, if that is known.
    """
    try:
        yield
    except OSError as error:
        if is_full_disk(error):
            raise full_disk(folder, needed) from error
        raise ModelError(
            f"{error.filename or folder} cannot be written: {error.strerror}. Give this user the "
            "right to write there, or set XDG_CACHE_HOME to another folder."
        ) from error


def say(line: str) -> None:
    """Write one line of progress to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextmanager
def progress_bar(what: str, total: int, *, shown: bool) -> Iterator["tqdm[Never]"]:
    """Show a bar of bytes on a terminal, and one plain line elsewhere."""
    if shown and not sys.stderr.isatty():
        say(f"{what} ({total / 1e6:,.0f} MB)")
    with tqdm(
        desc=what,
        total=total,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=not (shown and sys.stderr.isatty()),
    ) as bar:
        yield bar


def replace_durably(source: Path, target: Path) -> None:
    """Move a finished file or folder to its place, so that a power cut leaves old or new."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for inner in source.rglob("*"):
        _sync(inner)
    _sync(source)
    source.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
