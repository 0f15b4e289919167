"""What keys and values may take of a device, what others use of it, and what is given back."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import GIB, FakeCuda, FakeNvml

from cloud_engine import device_memory as device_memory_module
from cloud_engine.device_memory import CudaMemory, HostMemory, device_memory
from cloud_engine.memory_plan import HOST_SHARE, device_budget
from engine_core.machine_limits import memory_limit

GPU = torch.device("cuda")


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        self.now += 1  # a look is due every time, unless the test says otherwise
        return self.now


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Return a GPU with weights on it."""
    fake = FakeCuda()
    fake.install(monkeypatch)
    fake.take(14 * GIB)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(device_memory_module, "time", Clock())
    return fake


def without_others(cuda: FakeCuda) -> CudaMemory:
    memory = CudaMemory(GPU)
    memory.planned()
    assert memory.use() == 0
    assert cuda.free == 66 * GIB
    return memory


def test_the_budget_is_what_the_largest_step_and_the_graphs_leave(cuda: FakeCuda) -> None:
    order = []

    def step() -> None:
        order.append("step")
        if len(order) == 1:
            cuda.take(GIB)  # a workspace that stays
            cuda.work(9 * GIB)  # tuning, which the next steps do without
        cuda.work(3 * GIB)

    def capture() -> None:
        order.append("capture")
        cuda.work(2 * GIB)

    budget = CudaMemory(GPU).kv_budget(step, capture)
    assert order == ["step", "step", "capture"]
    assert budget == device_budget(free=(80 - 15) * GIB, step_peak=3 * GIB, graph=2 * GIB)
    assert cuda.reserved == 15 * GIB
    assert cuda.calls.index("reset_peak_memory_stats") < cuda.calls.index("max_memory_allocated")


def test_without_graphs_nothing_is_put_aside_for_them(cuda: FakeCuda) -> None:
    budget = CudaMemory(GPU).kv_budget(lambda: cuda.work(GIB), lambda: None)
    assert budget == device_budget(free=66 * GIB, step_peak=GIB, graph=0)


def test_memory_that_others_take_of_the_headroom_is_their_use(cuda: FakeCuda) -> None:
    memory = without_others(cuda)
    cuda.others = 33 * GIB
    assert memory.use() == 0.5
    cuda.others = 80 * GIB
    assert memory.use() == 1
    cuda.others = 0
    assert memory.use() == 0


def test_memory_that_our_own_steps_reserve_is_not_others_use(cuda: FakeCuda) -> None:
    memory = without_others(cuda)
    cuda.work(50 * GIB)
    assert cuda.free == 16 * GIB
    assert memory.use() == 0
    cuda.others = 11 * GIB
    assert memory.use() == pytest.approx(11 / 66)


def test_the_driver_is_asked_twice_a_second_at_most(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr(device_memory_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    memory = without_others(cuda)
    cuda.others = 33 * GIB
    clock.now += 0.4
    assert memory.use() == 0
    clock.now += 0.2
    assert memory.use() == 0.5


def test_a_gpu_without_headroom_is_not_in_use_by_others(cuda: FakeCuda) -> None:
    cuda.others = cuda.free
    memory = CudaMemory(GPU)
    memory.planned()
    assert memory.use() == 0


def test_torchs_cache_is_emptied_when_it_is_asked_for_or_worth_it(cuda: FakeCuda) -> None:
    memory = without_others(cuda)
    cuda.calls.clear()
    cuda.work(4 * GIB)
    memory.release(always=False)  # 4 of 18 is not worth it
    assert "empty_cache" not in cuda.calls
    cuda.work(5 * GIB)
    memory.release(always=False)
    assert (cuda.calls.count("empty_cache"), cuda.reserved) == (1, 14 * GIB)
    cuda.work(GIB)
    memory.release(always=True)
    assert (cuda.calls.count("empty_cache"), cuda.reserved) == (2, 14 * GIB)


def test_details_tell_free_reserved_and_fragmented_memory(cuda: FakeCuda) -> None:
    memory = without_others(cuda)
    cuda.work(14 * GIB)
    cuda.others = 33 * GIB
    memory.use()
    assert memory.details() == {
        "gpu_free_bytes": 19 * GIB,
        "gpu_reserved_bytes": 28 * GIB,
        "gpu_allocated_bytes": 14 * GIB,
        "gpu_fragmentation": 0.5,
        "gpu_use_by_others": 0.5,
    }


def sample(pid: int, share: int, when: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, smUtil=share, timeStamp=when)


def test_time_in_others_kernels_is_their_use(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml([os.getpid(), 4, 5])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    memory = without_others(cuda)
    nvml.samples = [sample(os.getpid(), 90, 7), sample(4, 30, 7), sample(5, 25, 8)]
    assert memory.use() == pytest.approx(0.55)
    assert memory.use() == 0  # nothing new
    nvml.samples.append(sample(4, 70, 9))
    cuda.others = 33 * GIB
    assert memory.use() == pytest.approx(0.7)  # the larger share
    assert nvml.asked_since == [0, 0, 8, 8]


@pytest.mark.parametrize("pids", [[], [1, 2]])
def test_a_driver_that_knows_us_by_another_number_is_not_asked(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, pids: list[int]
) -> None:
    nvml = FakeNvml(pids)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    memory = without_others(cuda)
    nvml.samples = [sample(1, 99, 7)]
    assert memory.use() == 0
    assert nvml.asked_since == []


def test_a_driver_that_refuses_is_not_asked_again(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml([os.getpid()])
    monkeypatch.setattr(FakeNvml, "nvmlInit", lambda _: (_ for _ in ()).throw(nvml.NVMLError))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    without_others(cuda)
    assert nvml.asked_since == []


def test_on_the_host_keys_and_values_may_take_a_share_of_what_the_process_may() -> None:
    memory = device_memory(torch.device("cpu"))
    assert isinstance(memory, HostMemory)
    assert memory.kv_budget(lambda: None, lambda: None) == int(memory_limit() * HOST_SHARE)
    memory.planned()
    memory.release(always=True)
    assert memory.use() == 0
    assert memory.details() == {}


def test_a_gpu_has_a_memory_of_its_own(cuda: FakeCuda) -> None:
    assert isinstance(device_memory(GPU), CudaMemory)
    assert cuda.calls == []  # nothing is measured yet
