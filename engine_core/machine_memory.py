"""How much memory this process may take at most."""

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
    return min([psutil.virtual_memory().total, *_group_limits(cgroups, mount)])


def _group_limits(cgroups: Path, mount: Path) -> Iterator[int]:
    try:
        lines = cgroups.read_text("utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, alone or beside version 1
            root = mount / "unified" if (mount / "unified").is_dir() else mount
            name = "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A limit binds everything below it. Inside a container the path may be one that only the
        # host sees; then the mount itself is our group.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            limit = _read_limit(folder / name)
            if limit is not None:
                yield limit


def _read_limit(file: Path) -> int | None:
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError):  # not there, or the word "max"
        return None
