"""`benchmarks/cloud_gpu.py` on a CPU: it runs, and its drill counts who is lost."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEYS = [
    "device",
    "buckets_ok",
    "bandwidth_share_b1",
    "ttft_gain",
    "qps_gain_b8",
    "vs_generate_eager",
    "vs_generate_compiled",
    "oom_drill_lost",
]
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 128,
}
OTHERS, NEW, LONG = 4, 24, 64


@pytest.mark.slow
def test_the_script_runs_without_a_gpu_and_says_null_where_it_takes_one() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "cloud_gpu.py", "--shape", "tiny", "--device", "cpu"],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == KEYS
    assert found["device"] == "cpu"
    assert found["bandwidth_share_b1"] > 0
    assert found["vs_generate_eager"] > 0
    assert found["ttft_gain"] == {"16": None, "64": None}
    for key in ("buckets_ok", "qps_gain_b8", "vs_generate_compiled", "oom_drill_lost"):
        assert found[key] is None
    assert "Error" not in done.stdout
    assert not done.stderr


@pytest.fixture
async def drill(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[Any], Any]]:
    """Return a drill on an engine whose steps, while it is full, do what they are told to."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import torch
    from gpu_drill import lost_for_want_of_memory
    from gpu_engines import Engine, WatchedRunner, random_llama

    from cloud_engine.packed_model import PackedModel
    from cloud_engine.runner import RunnerOptions

    class FakeFullRunner(WatchedRunner):
        inside: Callable[[Sequence[Any]], None] = staticmethod(lambda _: None)

        def _compute(self, rows: Sequence[Any]) -> Any:
            self.inside(rows)
            return super()._compute(rows)

    model = PackedModel(random_llama(SIZES, torch.device("cpu"), torch.float32))
    engine = Engine(model, RunnerOptions(kv_memory=2**20), FakeFullRunner)
    await engine.start()

    @contextmanager
    def full(inside: Callable[[Sequence[Any]], None]) -> Iterator[None]:
        engine.runner.inside = inside
        yield
        engine.runner.inside = lambda _: None

    async def run(inside: Callable[[Sequence[Any]], None]) -> int:
        others = [[index, 1] for index in range(OTHERS)]
        long = list(range(32)) * (LONG // 32)
        return await lost_for_want_of_memory(engine, others, long, NEW, full(inside))

    yield run
    await engine.close()


def out_of_memory() -> Exception:
    import torch

    return torch.OutOfMemoryError("fake")


async def test_nobody_is_lost_where_smaller_steps_fit(
    drill: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def inside(rows: Sequence[Any]) -> None:
        if sum(len(row.tokens) for row in rows) > 8:
            raise out_of_memory()

    assert await drill(inside) == 0
    assert "was answered, 0 of 4 others were lost" in capsys.readouterr().out


async def test_a_prompt_that_fits_in_no_step_is_refused_alone(
    drill: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def inside(rows: Sequence[Any]) -> None:
        if any(row.begin + len(row.tokens) > 40 for row in rows):
            raise out_of_memory()

    assert await drill(inside) == 0
    assert "was refused, 0 of 4 others were lost" in capsys.readouterr().out


async def test_those_whose_steps_do_not_fit_any_more_are_counted(
    drill: Callable[[Any], Any],
) -> None:
    def inside(_: Sequence[Any]) -> None:
        raise out_of_memory()

    assert await drill(inside) == OTHERS


async def test_a_drill_in_which_all_steps_fit_shows_nothing(drill: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match="all steps had enough memory"):
        await drill(lambda _: None)
