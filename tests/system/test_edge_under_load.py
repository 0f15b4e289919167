"""The edge engine's own pages answer while every slot is busy."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engine_process import EngineProcess, engine_process

from engine_core.models import BUILTIN, ModelFiles

CLIENTS = 8


def talk(engine: EngineProcess, until: float, number: int) -> int:
    """Ask for long answers to long prompts until a moment; return how many tokens came."""
    tokens = 0
    while time.monotonic() < until:
        body = {
            "model": "m",
            "prompt": f"{number} {tokens} " + "the quick brown fox " * (50 + 30 * number),
            "max_tokens": 60,
            "temperature": 1,
            "stream": True,
        }
        with engine.http.stream("POST", "/v1/completions", json=body, timeout=600) as response:
            tokens += sum(line.startswith("data: {") for line in response.iter_lines())
    return tokens


@pytest.mark.slow
def test_health_answers_at_once_under_full_load(builtin_files: ModelFiles) -> None:
    """20 times a second for 10 s, beside 8 streams."""
    assert builtin_files.path.exists()
    with (
        engine_process("edge_engine", "--model", BUILTIN) as engine,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        engine.wait_until_ready()
        until = time.monotonic() + 10
        streams = [pool.submit(talk, engine, until, number) for number in range(CLIENTS)]
        seconds, busy = [], 0
        while time.monotonic() < until - 1:
            began = time.perf_counter()
            assert engine.http.get("/engine/health").status_code == 200
            seconds.append(time.perf_counter() - began)
            busy = max(busy, engine.stats()["running"])
            time.sleep(0.05)
        assert busy == CLIENTS
        assert all(stream.result() for stream in streams)
        # What this machine's other work takes from a single answer is not the engine's.
        assert np.percentile(seconds, 95) < 0.05
