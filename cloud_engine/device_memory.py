"""The memory that a model runs in, a GPU's or the host's: its budget, its account, its relief."""

import os
import time
from collections.abc import Callable
from typing import Protocol

import torch

from cloud_engine.memory_plan import HOST_SHARE, device_budget
from engine_core.machine_limits import memory_limit

FRAGMENTED = 0.25
"""Share of what torch keeps of a GPU, beyond what is in use, above which it is worth a pause of
some milliseconds to give it back."""
_LOOK_SECONDS = 0.5
"""Between two looks at what others do with the GPU; one takes the driver up to a millisecond."""


class DeviceMemory(Protocol):
    """Where weights, keys and values and the steps' working memory are."""

    def kv_budget(self, step: Callable[[], object], capture: Callable[[], object]) -> int:
        """Return the bytes that keys and values may take.

        Args:
            step: Runs the largest step, on hardly any keys and values.
            capture: Captures the largest graph and forgets it; does nothing without graphs.
        """
        ...

    def planned(self) -> None:
        """Note that all memory that lasts is taken."""
        ...

    def use(self) -> float:
        """Return how much of the device others use, 0 to 1."""
        ...

    def release(self, *, always: bool) -> None:
        """Give back what no step is using; unless `always`, only if it is worth it."""
        ...

    def details(self) -> dict[str, str | int | float | bool]:
        """Return what stats say about it; cheap, from any thread."""
        ...


class HostMemory:
    """The machine's own memory; the operating system shares it between processes."""

    def kv_budget(self, step: Callable[[], object], capture: Callable[[], object]) -> int:  # noqa: ARG002
        """Return a share of what this process may take."""
        return int(memory_limit() * HOST_SHARE)

    def planned(self) -> None:
        """Do nothing: pages come as they are written."""

    def use(self) -> float:
        """Return 0: how busy the machine is, is the router's business."""
        return 0.0

    def release(self, *, always: bool) -> None:
        """Do nothing: torch keeps no host memory."""

    def details(self) -> dict[str, str | int | float | bool]:
        """Return nothing."""
        return {}


class CudaMemory:
    """A GPU's memory, which torch keeps for itself once it has had it.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._headroom = 0
        self._ours = 0
        self._processes = _other_load(device)
        self._looked = float("-inf")
        self._use = 0.0

    def kv_budget(self, step: Callable[[], object], capture: Callable[[], object]) -> int:
        """Return what is left beside the largest step and the graphs, both measured."""
        step()  # libraries make their workspaces and kernels are compiled
        self._settle()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        step()
        peak = torch.cuda.max_memory_allocated(self._device) - before
        self._settle()
        free = self._free()
        capture()
        torch.cuda.synchronize(self._device)
        graph = max(0, free - self._free())
        self._settle()
        return device_budget(free=self._free(), step_peak=peak, graph=graph)

    def planned(self) -> None:
        """Note how much is left free, and how much is that or torch's: others take of it."""
        self._settle()
        self._headroom = self._free()
        self._ours = self._free() + torch.cuda.memory_reserved(self._device)

    def use(self) -> float:
        """Return the larger of two shares: time in others' kernels, and headroom that is gone.

        Our own load is no reason to do less at a time.
        """
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            # What our own steps have reserved since is no less free to them.
            ours = self._free() + torch.cuda.memory_reserved(self._device)
            taken = (self._ours - ours) / self._headroom if self._headroom else 0.0
            self._use = min(1.0, max(0.0, taken, self._processes()))
        return self._use

    def release(self, *, always: bool) -> None:
        """Return torch's unused segments to the driver, if asked to or if they are many."""
        if always or self._fragmentation() > FRAGMENTED:
            torch.cuda.empty_cache()

    def details(self) -> dict[str, str | int | float | bool]:
        """Return bytes free on the GPU, reserved and in use by torch, and their disproportion."""
        return {
            "gpu_free_bytes": self._free(),
            "gpu_reserved_bytes": torch.cuda.memory_reserved(self._device),
            "gpu_allocated_bytes": torch.cuda.memory_allocated(self._device),
            "gpu_fragmentation": round(self._fragmentation(), 3),
            "gpu_use_by_others": round(self._use, 3),
        }

    def _free(self) -> int:
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free

    def _fragmentation(self) -> float:
        reserved = torch.cuda.memory_reserved(self._device)
        return 1 - torch.cuda.memory_allocated(self._device) / reserved if reserved else 0.0

    def _settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory of a device."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def _other_load(device: torch.device) -> Callable[[], float]:
    """Return what reads the share of time that a GPU spends in other processes' kernels.

    It reads 0 where nvidia-ml-py is not installed, and where the driver does not know this process
    by the number that we know it by, as in most containers: our own load would pass for others'.
    """
    try:
        import pynvml  # noqa: PLC0415 - an optional library

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        known = {p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except Exception:  # noqa: BLE001 - the library is missing, or the driver says no in its own way
        return lambda: 0.0
    own = os.getpid()
    if own not in known:
        return lambda: 0.0
    seen = 0

    def read() -> float:
        nonlocal seen
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, seen)
        except pynvml.NVMLError:  # no sample since the last look
            return 0.0
        seen = max((sample.timeStamp for sample in samples), default=seen)
        newest: dict[int, int] = {s.pid: s.smUtil for s in samples if s.pid != own}
        return sum(newest.values()) / 100

    return read
