"""How much of the machine the process may use, from control groups of both versions."""

import os
from pathlib import Path

import psutil
import pytest

from engine_core.machine_limits import cpu_limit, memory_limit, threads_fault

TOTAL = 16 * 2**30
UNLIMITED = str(2**63 - 4096)  # what version 1 says where there is no limit


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        total = TOTAL

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


class Groups:
    """A made-up /proc/self/cgroup and the folders it names."""

    def __init__(self, folder: Path) -> None:
        self.cgroups = folder / "cgroup"
        self.mount = folder / "mount"
        self.mount.mkdir()

    def limit(self, lines: str, **files: str) -> int:
        """Return the limit of memory with these lines and files."""
        self.write(lines, **files)
        return memory_limit(self.cgroups, self.mount)

    def cpus(self, lines: str, **files: str) -> int | None:
        """Return the limit of processors with these lines and files."""
        self.write(lines, **files)
        return cpu_limit(self.cgroups, self.mount)

    def write(self, lines: str, **files: str) -> None:
        """Write these lines and files; `__` in a name stands for `/`."""
        self.cgroups.write_text(lines, "utf-8")
        for name, text in files.items():
            file = self.mount / name.replace("__", "/")
            file = file.with_name(file.name.replace("_dot_", "."))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "absent", tmp_path) == TOTAL


def test_the_lowest_limit_on_the_way_up_counts_in_version_2(groups: Groups) -> None:
    assert (
        groups.limit(
            "0::/a/b/c\n",
            a__memory_dot_max=str(2**30),
            a__b__memory_dot_max=str(2**31),
            a__b__c__memory_dot_max="max\n",
        )
        == 2**30
    )


def test_version_2_beside_version_1_is_looked_up_where_it_is_mounted(groups: Groups) -> None:
    assert groups.limit("0::/a\n", unified__a__memory_dot_max=str(2**29)) == 2**29


def test_version_1_is_read_from_its_memory_hierarchy(groups: Groups) -> None:
    lines = "9:name=systemd:/\n4:cpu,memory:/box\n3:cpuset:/other\n"
    limit = groups.limit(
        lines,
        memory__memory_dot_limit_in_bytes=UNLIMITED,
        memory__box__memory_dot_limit_in_bytes=str(2**28),
        cpuset__other__memory_dot_limit_in_bytes="1",
    )
    assert limit == 2**28


def test_a_path_that_only_the_host_sees_leaves_the_mount_itself(groups: Groups) -> None:
    assert groups.limit("0::/docker/1234\n", memory_dot_max=str(2**27)) == 2**27


def test_no_limit_at_all_leaves_the_machines(groups: Groups) -> None:
    assert groups.limit("4:memory:/\n", memory__memory_dot_limit_in_bytes=UNLIMITED) == TOTAL


def test_processors_are_the_quota_by_the_period_rounded_up(groups: Groups) -> None:
    assert (
        groups.cpus("0::/a/b\n", a__cpu_dot_max="150000 100000\n", a__b__cpu_dot_max="max 100000")
        == 2
    )


def test_processors_of_version_1(groups: Groups) -> None:
    files = {"cpu__box__cpu_dot_cfs_quota_us": "50000", "cpu__box__cpu_dot_cfs_period_us": "100000"}
    assert groups.cpus("4:cpu,cpuacct:/box\n", **files) == 1


def test_no_quota_leaves_all_processors(groups: Groups) -> None:
    files = {"cpu__cpu_dot_cfs_quota_us": "-1", "cpu__cpu_dot_cfs_period_us": "100000"}
    assert groups.cpus("4:cpu:/\n", **files) is None
    assert cpu_limit(groups.cgroups.with_name("absent"), groups.mount) is None


def test_more_threads_than_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert threads_fault(4) is None
    fault = threads_fault(5)
    assert fault is not None
    assert "at most 4" in fault
