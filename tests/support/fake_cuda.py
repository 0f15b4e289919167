"""A GPU's memory as torch and the driver tell of it, and what NVML tells of its users."""

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

GIB = 2**30


class FakeCuda:
    """Counts bytes; torch keeps what it once had until its cache is emptied.

    Args:
        total: Of the GPU.
    """

    def __init__(self, total: int = 80 * GIB) -> None:
        self.total = total
        self.allocated = 0
        self.reserved = 0
        self.others = 0
        """Bytes of other processes."""
        self.peak = 0
        self.calls: list[str] = []

    @property
    def free(self) -> int:
        return self.total - self.reserved - self.others

    def take(self, count: int) -> None:
        """Allocate bytes for good."""
        self.allocated += count
        self.reserved = max(self.reserved, self.allocated)
        self.peak = max(self.peak, self.allocated)

    def work(self, count: int) -> None:
        """Allocate bytes and free them."""
        self.take(count)
        self.allocated -= count

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of `torch.cuda`'s functions."""
        import torch

        answers: dict[str, Callable[[], Any]] = {
            "synchronize": lambda: None,
            "empty_cache": self._empty_cache,
            "memory_allocated": lambda: self.allocated,
            "memory_reserved": lambda: self.reserved,
            "max_memory_allocated": lambda: self.peak,
            "reset_peak_memory_stats": self._reset_peak,
            "mem_get_info": lambda: (self.free, self.total),
            "get_device_properties": lambda: SimpleNamespace(uuid="8f0c"),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, self._noting(name, answer))

    def _noting(self, name: str, answer: Callable[[], Any]) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            self.calls.append(name)
            return answer()

        return call

    def _empty_cache(self) -> None:
        self.reserved = self.allocated

    def _reset_peak(self) -> None:
        self.peak = self.allocated


class FakeNvml(ModuleType):
    """The module `pynvml` on a machine with one GPU.

    Args:
        pids: Processes that compute on it, by the driver's numbers.
    """

    class NVMLError(Exception):
        """What the driver answers when there is nothing to tell."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__("pynvml")
        self.pids = pids
        self.samples: list[Any] = []
        self.asked_since: list[int] = []

    def nvmlInit(self) -> None:  # noqa: N802 - its name
        """Do nothing."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - its name
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802 - its name
        assert handle == "GPU-8f0c"
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:  # noqa: N802 - its name
        assert handle == "GPU-8f0c"
        self.asked_since.append(since)
        samples = [sample for sample in self.samples if sample.timeStamp > since]
        if not samples:
            raise self.NVMLError
        return samples
