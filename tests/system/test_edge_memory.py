"""The edge engine as a process keeps inside its limits, and says where its bytes are."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, engine_process
from memory_cgroup import memory_group
from tiny_models import TINY, save_tiny_model
from tiny_tokenizer import BYTE_VOCABULARY, save_byte_tokenizer

from edge_engine.build import ensure_build
from edge_engine.manifest import DATA_FILE
from engine_core.models import BUILTIN, ModelFiles, ModelStore

MIB = 2**20

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a model so small that attention's share of working memory shows.

    One token takes 6 KiB behind none, and 64 KiB behind 3,900 others (measured).
    """
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    folder = tmp_path / "tiny-llama"
    numbers = {"vocab_size": BYTE_VOCABULARY, "max_position_embeddings": 4096}
    save_tiny_model(folder, "llama", **(TINY | numbers))
    save_byte_tokenizer(folder)
    return str(folder)


def complete(engine: EngineProcess, prompt: str, tokens: int = 4) -> tuple[int, dict[str, Any]]:
    answer = engine.http.post(
        "/v1/completions",
        json={"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0},
        timeout=600,
    )
    return answer.status_code, answer.json()


def resident_by_mapping(pid: int) -> list[tuple[str, int, int]]:
    """Return name, bytes and resident bytes of each mapping of a process."""
    mappings: list[tuple[str, int, int]] = []
    name, size = "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text("utf-8").splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            name = values[4] if len(values) > 4 else ""
        elif key == "Size:":
            size = int(values[0]) * 1024
        elif key == "Rss:":
            mappings.append((name, size, int(values[0]) * 1024))
    return mappings


def test_a_sequence_that_no_step_has_memory_for_fails_alone(tiny: str) -> None:
    options = ("--model", tiny, "--context", "4000", "--slots", "4", "--threads", "1")
    with engine_process("edge_engine", *options, "--step-memory", "32KiB") as engine:
        engine.wait_until_ready()
        prompts = ["a" * 300, "b" * 3900, "c" * 300, "d" * 200]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: complete(engine, prompt), prompts))
        assert [status for status, _ in answers] == [200, 500, 200, 200]
        error = answers[1][1]["error"]
        assert error["code"] == "engine_error"
        assert "memory" in error["message"]
        again, answer = complete(engine, prompts[0])
        assert again == 200
        assert answer["choices"] == answers[0][1]["choices"]
        stats = engine.stats()
        assert stats["failed_total"] == 1
        assert stats["running"] == stats["waiting"] == 0
        assert "Traceback" not in engine.log()


@pytest.mark.slow
@linux_only
def test_eight_long_prompts_never_hit_a_real_limit(builtin_files: ModelFiles) -> None:
    """Without options the budgets follow from the control group's limit."""
    weights = ensure_build(ModelStore(), builtin_files).folder / DATA_FILE
    with weights.open("rb") as stream:
        # Or the page cache would be charged to whoever read the file before.
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    limit = 768 * MIB
    with (
        memory_group(limit) as group,
        engine_process("edge_engine", "--model", BUILTIN, prefix=group.prefix) as engine,
    ):
        engine.wait_until_ready()
        prompts = [f"{number} " + "the quick brown fox " * 250 for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: complete(engine, prompt), prompts))
        assert [status for status, _ in answers] == [200] * 8
        assert all(answer["usage"]["prompt_tokens"] > 1000 for _, answer in answers)
        assert "2 slots = 180 MiB of a budget of 192 MiB" in engine.log()
        assert group.kills() == 0
        assert group.peak() < limit


@pytest.mark.slow
@linux_only
def test_the_parts_of_memory_are_what_the_kernel_says(builtin_files: ModelFiles) -> None:
    weights = str(ensure_build(ModelStore(), builtin_files).folder / DATA_FILE)
    with engine_process("edge_engine", "--model", BUILTIN, "--slots", "2") as engine:
        engine.wait_until_ready()
        for level in (None, 0, 2):
            if level is None:
                complete(engine, "the quick brown fox " * 200)
            freed = engine.http.post("/engine/pressure", json={"level": level or 0}).json()
            assert freed["after"] <= freed["before"]
            stats = engine.stats()
            parts = stats["memory"]
            mappings = resident_by_mapping(engine.process.pid)
            in_file = sum(rss for name, _, rss in mappings if name == weights)
            kv = max(rss for _, size, rss in mappings if size >= stats["kv_total_bytes"])
            assert parts["weights_mapped"] == pytest.approx(in_file, abs=4 * MIB)
            assert parts["kv"] == pytest.approx(kv, abs=MIB)
            rss = sum(rss for _, _, rss in mappings)
            assert sum(parts.values()) == pytest.approx(rss, rel=0.1)
            assert stats["rss_bytes"] == pytest.approx(rss, rel=0.02)
            assert parts["weights_packed"] < 32 * MIB
        assert parts["kv"] < 2 * MIB


@pytest.mark.slow
@linux_only
def test_a_second_engine_shares_the_weights(builtin_files: ModelFiles) -> None:
    weights = str(ensure_build(ModelStore(), builtin_files).folder / DATA_FILE)
    with (
        engine_process("edge_engine", "--model", BUILTIN, "--slots", "1") as first,
        engine_process("edge_engine", "--model", BUILTIN, "--slots", "1") as second,
    ):
        shared, private = 0, 0
        for engine in (first, second):
            engine.wait_until_ready()
        for line in Path(f"/proc/{second.process.pid}/smaps").read_text("utf-8").splitlines():
            key, *values = line.split()
            if not key.endswith(":"):
                inside = values[-1] == weights
            elif inside and key == "Shared_Clean:":
                shared += int(values[0]) * 1024
            elif inside and key in ("Private_Clean:", "Private_Dirty:"):
                private += int(values[0]) * 1024
        assert shared > 100 * MIB
        assert private < 0.05 * shared
