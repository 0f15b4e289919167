"""Where the bytes of this process are, by cheap readings of the kernel's counters."""

import mmap
from pathlib import Path
from typing import NamedTuple

_STATM = Path("/proc/self/statm")
_SMAPS = Path("/proc/self/smaps")


class _Resident(NamedTuple):
    anonymous: int
    of_files: int


class MemoryAccount:
    """Takes the process's resident memory apart.

    Make it before the model is loaded, and call `loaded` after the first step: pages of the
    runtime's own code come in with it. Where there is no /proc, all parts stay unknown.
    """

    def __init__(self) -> None:
        self._base = _resident()
        self._packed = 0

    def loaded(self, weights: Path, kv: int) -> None:
        """Note what loading took. Takes about 20 ms.

        Args:
            weights: The file that the model's weights are mapped from.
            kv: Resident bytes of keys and values.
        """
        now = _resident()
        if now is None or self._base is None:
            return
        private = now.anonymous - kv
        anonymous = min(private, self._base.anonymous)
        self._packed = private - anonymous
        self._base = _Resident(anonymous, now.of_files - _mapped_bytes(weights))

    def parts(self, kv: int) -> dict[str, int]:
        """Return the parts, which add up to the resident memory; empty where nothing is known.

        Takes about 10 µs.

        - `python_and_libraries`: the interpreter, its modules and all libraries' code
        - `weights_mapped`: pages of the weights' file, which processes share; those of the
          embedding come in as its tokens are first seen
        - `weights_packed`: what loading took in private memory: weights as kernels want them,
          where they are not in that file, and the runtime's own structures
        - `kv`: keys and values
        - `arena`: what has come since: the runtime's arena, and whatever requests leave behind

        Args:
            kv: Resident bytes of keys and values.
        """
        now = _resident()
        if now is None or self._base is None:
            return {}
        return {
            "python_and_libraries": sum(self._base),
            "weights_mapped": max(0, now.of_files - self._base.of_files),
            "weights_packed": self._packed,
            "kv": kv,
            "arena": max(0, now.anonymous - self._base.anonymous - self._packed - kv),
        }


def _resident() -> _Resident | None:
    try:
        fields = _STATM.read_bytes().split()
    except OSError:
        return None
    resident, shared = (int(pages) * mmap.PAGESIZE for pages in fields[1:3])
    return _Resident(resident - shared, shared)


def _mapped_bytes(file: Path) -> int:
    """Return how many bytes of a file are resident here through mappings."""
    total = 0
    name = str(file.resolve())
    inside = False
    with _SMAPS.open(encoding="utf-8") as lines:
        for line in lines:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):  # the head of a mapping: addresses, rights, …, file
                inside = line.rstrip().endswith(name)
            elif inside and first == "Rss:":
                total += int(rest.split()[0]) * 1024
    return total
