"""Memory for keys and values: pages exist once something is written, and can be given back."""

import contextlib
import ctypes
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine_core.byte_sizes import format_bytes
from engine_core.errors import ModelError

_ON_LINUX = sys.platform == "linux"


class KvMemory:
    """One anonymous mapping that arrays are cut from.

    NumPy would ask the kernel for pages of 2 MiB, and the first token of a sequence touches all
    layers, so that it would take 120 MB of the built-in model's 8 slots. With small pages it takes
    2.5 MB, and steps are just as fast (measured at up to 1,900 tokens and 8 sequences).

    Args:
        nbytes: Room for all arrays, each on pages of its own.

    Raises:
        ModelError: the system has no room for so large a mapping.
    """

    def __init__(self, nbytes: int) -> None:
        # Private: the default, shared, would be a file of tmpfs to the kernel.
        options = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if _ON_LINUX else {}
        try:
            self._map = mmap.mmap(-1, nbytes, **options)
        except OSError as error:
            raise ModelError(
                f"the system has no room for {format_bytes(nbytes)} of keys and values "
                f"({error.strerror}); lower kv_memory or context."
            ) from None
        if _ON_LINUX:
            with contextlib.suppress(OSError):  # a kernel that has no huge pages
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self._start = np.frombuffer(self._map, np.uint8).ctypes.data
        self._used = 0

    @staticmethod
    def room_for(nbytes: int) -> int:
        """Return what an array of `nbytes` takes of the mapping: whole pages."""
        return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def array(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Cut the next array off, all zeros.

        Raises:
            ValueError: the mapping has no room left for it.
        """
        count = int(np.prod(shape))
        array = np.frombuffer(self._map, dtype, count, self._used).reshape(shape)
        self._used += self.room_for(array.nbytes)
        return array

    def release(self, view: NDArray[np.generic]) -> None:
        """Give the pages of a part of an array back; what is on them becomes zero.

        Pages that the part shares with its neighbours stay. Only Linux gives pages back at once;
        elsewhere nothing happens.

        Args:
            view: A contiguous part of one of the arrays.
        """
        if not _ON_LINUX:
            return
        if not view.flags.c_contiguous:
            raise ValueError("only a contiguous part of an array has pages of its own")
        begin = view.ctypes.data - self._start
        first = self.room_for(begin)
        length = (begin + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)

    def resident_bytes(self) -> int:
        """Return how much of it is in memory now. Takes about 0.7 ms for each GiB that is.

        Where the kernel does not say (it is not Linux), that is all of it.
        """
        length = len(self._map)
        if not _ON_LINUX:
            return length
        pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
        ctypes.CDLL(None).mincore(
            ctypes.c_void_p(self._start),
            ctypes.c_size_t(length),
            ctypes.c_void_p(pages.ctypes.data),
        )
        # The other bits mean nothing yet.
        return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE
