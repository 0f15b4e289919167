"""The parts of the process's memory, against what the kernel says of each."""

import mmap
import sys
from pathlib import Path

import psutil
import pytest

from edge_engine import memory_account
from edge_engine.memory_account import MemoryAccount

MIB = 2**20

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "weights.data"
    file.write_bytes(bytes(32 * MIB))
    return file


def read_pages(mapping: mmap.mmap, size: int) -> None:
    for place in range(0, size, mmap.PAGESIZE):
        mapping[place]


def private_pages(mib: int) -> mmap.mmap:
    """Return memory fresh from the kernel; an allocator might hand out what was there before."""
    pages = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for place in range(0, len(pages), mmap.PAGESIZE):
        pages[place] = 1
    return pages


@linux_only
def test_every_byte_is_in_the_part_where_it_belongs(weights: Path) -> None:
    account = MemoryAccount()
    kept = [private_pages(8), private_pages(16)]
    with weights.open("rb") as stream:
        mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    read_pages(mapping, 24 * MIB)
    account.loaded(weights, 8 * MIB)
    kept.append(private_pages(4))
    read_pages(mapping, 32 * MIB)
    parts = account.parts(8 * MIB)
    assert parts["kv"] == 8 * MIB
    assert parts["weights_mapped"] == pytest.approx(32 * MIB, abs=MIB)
    assert parts["weights_packed"] == pytest.approx(16 * MIB, abs=MIB)
    assert parts["arena"] == pytest.approx(4 * MIB, abs=MIB)
    assert sum(parts.values()) == pytest.approx(psutil.Process().memory_info().rss, abs=MIB)
    mapping.close()


@linux_only
def test_memory_that_loading_gave_back_does_not_make_a_part_negative(weights: Path) -> None:
    freed = private_pages(16)
    account = MemoryAccount()
    freed.close()
    account.loaded(weights, 0)
    parts = account.parts(0)
    assert parts["weights_packed"] == 0
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(psutil.Process().memory_info().rss, abs=MIB)


def test_where_the_kernel_says_nothing_all_parts_are_unknown(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_account, "_STATM", Path("/no/such/file"))
    account = MemoryAccount()
    account.loaded(weights, 0)
    assert account.parts(0) == {}
