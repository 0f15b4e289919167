"""A real control group with a memory limit, for tests."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """One group of version 1 or 2.

    Args:
        folder: Where the kernel shows it.
        limit_file: Name of the file with the limit.
        peak_file: Name of the file with the largest use so far.
        kills_file: Name of the file that counts kills.
    """

    folder: Path
    limit_file: str
    peak_file: str
    kills_file: str

    def limit(self, size: int) -> None:
        """Set the limit in bytes."""
        (self.folder / self.limit_file).write_text(str(size), "ascii")

    def peak(self) -> int:
        """Return the most bytes that were charged at once, page cache among them."""
        return int((self.folder / self.peak_file).read_text("ascii"))

    def kills(self) -> int:
        """Return how many processes the kernel has killed here for want of memory."""
        lines = (self.folder / self.kills_file).read_text("ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    @property
    def prefix(self) -> tuple[str, ...]:
        """A command that joins the group and then becomes the one that follows it."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ("sh", "-c", script, str(self.folder / "cgroup.procs"))


def _own_folders() -> Iterator[tuple[str, Path]]:
    for line in Path("/proc/self/cgroup").read_text("ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield "v1", _MOUNT / "memory" / path.lstrip("/")
        elif not controllers and (_MOUNT / "cgroup.controllers").exists():
            yield "v2", _MOUNT / path.lstrip("/")


@contextlib.contextmanager
def memory_group(size: int) -> Iterator[MemoryGroup]:
    """Make a group with a limit below our own and remove it, or skip the test with the reason."""
    try:
        version, own = next(_own_folders())
        folder = own / f"tidegate-test-{os.getpid()}"
        folder.mkdir()
    except (OSError, StopIteration) as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    if version == "v1":
        names = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
    else:
        names = ("memory.max", "memory.peak", "memory.events")
    group = MemoryGroup(folder, *names)
    try:
        try:
            group.limit(size)
        except OSError as error:
            pytest.skip(f"a memory limit cannot be set here: {error}")
        yield group
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a group; its last process may take a moment to be gone."""
    for _ in range(100):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
