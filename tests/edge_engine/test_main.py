"""The edge engine's command line, as a process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_process import engine_process
from tiny_models import TINY, save_tiny_model
from tiny_tokenizer import BYTE_VOCABULARY, save_byte_tokenizer

from edge_engine.build import find_build
from engine_core.models import ModelFiles, ModelStore


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a tiny Llama in a store of its own."""
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    folder = tmp_path / "tiny-llama"
    save_tiny_model(folder, "llama", **(TINY | {"vocab_size": BYTE_VOCABULARY}))
    save_byte_tokenizer(folder)
    return str(folder)


def edge_engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edge_engine", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_build_prints_the_folder_and_is_quick_the_second_time(model: str, tmp_path: Path) -> None:
    first = edge_engine("build", "--model", model)
    assert first.returncode == 0, first.stderr
    assert "building tiny-llama (int8)" in first.stderr
    store = ModelStore(tmp_path / "cache")
    build = find_build(store, store.find(model))
    assert build is not None
    assert first.stdout == f"{build.folder}\n"
    second = edge_engine("build", "--model", model)
    assert (second.stdout, second.stderr) == (first.stdout, "")


def test_serve_builds_what_is_missing_and_answers(model: str) -> None:
    with engine_process("edge_engine", "--model", model, "--context", "64") as engine:
        engine.wait_until_ready()
        answer = engine.http.post(
            "/v1/completions",
            json={"model": "m", "prompt": "abc", "max_tokens": 5, "temperature": 0},
        ).json()
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert engine.http.get("/engine/health").json()["context_window"] == 64
        assert "building tiny-llama" in engine.log()
        maps = Path(f"/proc/{engine.process.pid}/maps").read_text("utf-8")
        assert "libtorch" not in maps
        engine.process.terminate()
        assert engine.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--model", "builtin:nothing"], "is not a model's name"),
        (["serve", "--model", "/no/such/folder", "--uds", "s"], "There is no folder"),
        (["serve", "--uds", "s"], "--model"),
        (["build", "--model", "m", "--precision", "int4"], "int4"),
        (["serve", "--model", "m", "--uds", "s", "--kv-memory", "12"], "such as 768MiB"),
        (["serve", "--model", "m", "--uds", "s", "--kv-memory", "900000GiB"], "give at most"),
        (["serve", "--model", "m", "--uds", "s", "--step-memory", "1KiB"], "at least 16 KiB"),
        (["serve", "--model", "m", "--uds", "s", "--threads", "100000"], "processors"),
    ],
)
def test_what_the_user_must_change_is_one_line_and_exit_code_2(
    arguments: list[str], message: str
) -> None:
    done = edge_engine(*arguments)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_log_shows_how_the_memory_for_keys_and_values_is_cut_up(model: str) -> None:
    options = ("--model", model, "--slots", "3", "--context", "100", "--kv-memory", "1 MiB")
    with engine_process("edge_engine", *options) as engine:
        engine.wait_until_ready()
        assert (
            "kv: 512 B per token x (100 + 1) tokens x 3 slots = 152 KiB of a budget of 1 MiB"
            in (engine.log())
        )
        assert engine.stats()["kv_total_bytes"] == 512 * 101 * 3


def test_int8_keys_and_values_are_built_and_served(model: str) -> None:
    assert edge_engine("build", "--model", model, "--kv", "int8").returncode == 0
    options = ("--model", model, "--kv", "int8", "--slots", "3", "--context", "100")
    with engine_process("edge_engine", *options) as engine:
        engine.wait_until_ready()
        assert "building" not in engine.log()
        assert "kv: 128 B per token x (100 + 1) tokens x 3 slots" in engine.log()
        assert engine.stats()["details"]["kv"] == "int8"


def test_a_budget_that_holds_no_sequence_ends_the_engine_with_a_message(model: str) -> None:
    with engine_process("edge_engine", "--model", model, "--kv-memory", "10KiB") as engine:
        assert engine.wait(60) == 2
        last = engine.log().splitlines()[-1]
    assert last.startswith("error: one slot of 128 tokens would take 1 MiB")
    assert last.endswith("lower context to at most 19 tokens.")


def test_more_context_than_the_model_has_ends_the_engine_with_a_message(model: str) -> None:
    with engine_process("edge_engine", "--model", model, "--context", "4096") as engine:
        assert engine.wait(60) == 2
        assert "give at most 128" in engine.log()


@pytest.mark.slow
def test_a_build_that_is_told_to_stop_leaves_nothing_behind(
    builtin_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))
    command = [sys.executable, "-m", "edge_engine", "build", "--model", str(builtin_files.path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as build:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("tmp/*/model.onnx.data")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        build.terminate()
        assert build.wait(10) == 128 + signal.SIGTERM
    assert list(tmp_path.glob("tmp/*")) == []
    assert list(tmp_path.glob("builds/*")) == []
