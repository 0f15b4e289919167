"""Pages for keys and values come with the first write and go when they are told to."""

import mmap
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.errors import ModelError
from engine_core.kv_memory import KvMemory

PAGE = mmap.PAGESIZE
SLOT = (2, 512, 4)  # 4 pages of float32

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="pages are counted on Linux only")


def kv_memory(slots: int = 3, arrays: int = 2) -> tuple[KvMemory, list[np.ndarray]]:
    shape = (slots, *SLOT)
    memory = KvMemory(arrays * KvMemory.room_for(4 * int(np.prod(shape))))
    return memory, [memory.array(shape) for _ in range(arrays)]


def test_arrays_are_zeros_of_their_own_and_fill_the_room() -> None:
    memory, (first, second) = kv_memory()
    assert first.dtype == np.float32
    first[:] = 1
    assert not second.any()
    with pytest.raises(ValueError, match="smaller"):
        memory.array((1,))


def test_each_array_begins_on_a_page() -> None:
    memory = KvMemory(KvMemory.room_for(1) + KvMemory.room_for(PAGE + 1))
    assert memory.array((1,), np.uint8).ctypes.data % PAGE == 0
    assert memory.array((PAGE + 1,), np.uint8).ctypes.data % PAGE == 0


@linux_only
def test_only_what_was_written_is_resident() -> None:
    memory, (first, _) = kv_memory()
    assert memory.resident_bytes() == 0
    first[1, 0, 0] = 1
    assert memory.resident_bytes() == PAGE
    first[1] = 1
    assert memory.resident_bytes() == 4 * PAGE


@linux_only
def test_released_pages_go_and_read_as_zeros() -> None:
    memory, (first, second) = kv_memory()
    first[:] = second[:] = 1
    memory.release(first[1])
    assert memory.resident_bytes() == 20 * PAGE
    assert not first[1].any()
    assert first[0].all()
    assert first[2].all()
    assert second.all()
    first[1] = 2
    assert (first[1] == 2).all()


@linux_only
def test_a_large_array_takes_no_huge_pages() -> None:
    memory = KvMemory(64 * 2**20)
    array = memory.array((16 * 2**20,))
    array[:: 2**20] = 1
    assert memory.resident_bytes() == 16 * PAGE


@linux_only
def test_only_a_contiguous_part_can_be_released() -> None:
    memory, (first, _) = kv_memory()
    with pytest.raises(ValueError, match="contiguous"):
        memory.release(first[:, 0])


@linux_only
@given(st.data())
def test_releasing_never_touches_the_neighbours(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 3 * PAGE))
    rows = data.draw(st.integers(1, 4))
    row = data.draw(st.integers(0, rows - 1))
    memory = KvMemory(KvMemory.room_for(rows * width))
    array = memory.array((rows, width), np.uint8)
    array[:] = 1
    memory.release(array[row])
    others = np.delete(array, row, axis=0)
    assert others.all()
    kept = np.count_nonzero(array[row])
    assert kept < 2 * PAGE
    assert memory.resident_bytes() <= KvMemory.room_for(rows * width)


def test_more_than_the_system_has_names_what_to_lower() -> None:
    with pytest.raises(ModelError, match=r"no room for .* lower kv_memory or context"):
        KvMemory(2**60)
