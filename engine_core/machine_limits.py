"""How much of the machine this process may use at most: memory and processor time."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def memory_limit(cgroups: Path = _CGROUPS, mount: Path = _MOUNT) -> int:
    """Return the machine's bytes, or the lowest limit of the control groups that we are in.

    Args:
        cgroups: The kernel's list of this process's groups.
        mount: Where the group hierarchies are mounted: version 2, version 1 or both.
    """
    limits = [psutil.virtual_memory().total]
    for folder, version in _folders("memory", cgroups, mount):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        limits += _numbers(folder / name)
    return min(limits)


def cpu_limit(cgroups: Path = _CGROUPS, mount: Path = _MOUNT) -> int | None:
    """Return how many processors' time the control groups leave us, rounded up, or None.

    Args:
        cgroups: The kernel's list of this process's groups.
        mount: Where the group hierarchies are mounted: version 2, version 1 or both.
    """
    shares = []
    for folder, version in _folders("cpu", cgroups, mount):
        if version == 2:
            numbers = _numbers(folder / "cpu.max")
        else:
            numbers = [
                *_numbers(folder / "cpu.cfs_quota_us"),
                *_numbers(folder / "cpu.cfs_period_us"),
            ]
        # The quota is the word "max", or -1, where there is none.
        if len(numbers) == 2 and min(numbers) > 0:
            shares.append(numbers[0] / numbers[1])
    return math.ceil(min(shares)) if shares else None


def threads_fault(threads: int) -> str | None:
    """Return why so many threads make no sense on this machine, or None if they do.

    Threads beyond its processors wait for each other in every product of a step.
    """
    most = os.cpu_count() or 1
    if threads <= most:
        return None
    return f"{threads} threads are more than the processors of this machine; give at most {most}"


def _folders(controller: str, cgroups: Path, mount: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of our groups that have a controller, and the version of their files."""
    try:
        lines = cgroups.read_text("utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, alone or beside version 1
            root = mount / "unified" if (mount / "unified").is_dir() else mount
            version = 2
        elif controller in controllers.split(","):
            root, version = mount / controller, 1
        else:
            continue
        # A limit binds everything below it. Inside a container the path may be one that only the
        # host sees; then the mount itself is our group.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            yield folder, version


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a file; none if it is not there or has a word in it."""
    try:
        return [int(word) for word in file.read_text("ascii").split()]
    except (OSError, ValueError):
        return []
