"""The cloud engine's command line, as a process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, engine_process
from tiny_models import TINY, save_tiny_model
from tiny_tokenizer import BYTE_VOCABULARY, save_byte_tokenizer

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head size, float32


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a tiny Llama; what is converted goes into a store of its own."""
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path / "cache"))
    folder = tmp_path / "tiny-llama"
    save_tiny_model(folder, "llama", **TINY | {"vocab_size": BYTE_VOCABULARY})
    save_byte_tokenizer(folder)
    return str(folder)


def complete(engine: EngineProcess, **options: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "abc", "max_tokens": 5, "temperature": 0} | options
    answer: dict[str, Any] = engine.http.post("/v1/completions", json=body).json()
    return answer


def test_serve_answers_and_ends_when_it_is_told_to(model: str) -> None:
    with engine_process("cloud_engine", "--model", model, "--threads", "1") as engine:
        engine.wait_until_ready()
        assert complete(engine)["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert engine.http.get("/engine/health").json()["context_window"] == 128
        details = engine.stats()["details"]
        assert (
            details
            | {
                "kind": "torch",
                "architecture": "LlamaForCausalLM",
                "device": "cpu",
                "dtype": "float32",
                "attention": "torch",
                "graphs": "off: there is no GPU",
                "threads": 1,
                "max_running": 8,
                "running_limit": 8,
            }
            == details
        )
        engine.process.terminate()
        assert engine.wait() == 0


def test_options_reach_the_runner(model: str) -> None:
    options = (
        "--context",
        "100",
        "--kv-memory",
        "1 MiB",
        "--max-running",
        "3",
        "--dtype",
        "bfloat16",
    )
    with engine_process("cloud_engine", "--model", model, *options) as engine:
        engine.wait_until_ready()
        stats = engine.stats()
        blocks = 3 * 7 + 1  # 7 blocks of 16 tokens for each, and the trash block
        assert stats["kv_total_bytes"] == blocks * 16 * TOKEN_BYTES // 2
        assert (stats["details"]["max_running"], stats["details"]["dtype"]) == (3, "bfloat16")
        assert engine.http.get("/engine/health").json()["context_window"] == 100
        assert "kv: 22 blocks of 16 tokens x 4,096 B = 88 KiB of a budget of 1 MiB" in engine.log()


def test_int8_weights_take_less_and_answer(model: str) -> None:
    with engine_process("cloud_engine", "--model", model, "--weights", "int8-all") as engine:
        engine.wait_until_ready()
        assert complete(engine)["usage"]["completion_tokens"] == 5
        size = engine.stats()["details"]["weight_bytes"]
    assert size < 0.4 * (Path(model) / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/no/such/folder"], "There is no folder"),
        ([], "--model"),
        (["--model", "m", "--weights", "int4"], "int4"),
        (["--model", "m", "--device", "tpu"], "tpu"),
        (["--model", "m", "--kv-memory", "12"], "such as 768MiB"),
        (["--model", "m", "--max-running", "0"], "--max-running"),
        (["--model", "m", "--ladder", "60:100"], "--ladder: expected rungs"),
    ],
)
def test_what_the_user_must_change_is_one_line_and_exit_code_2(
    options: list[str], message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cloud_engine", "serve", "--uds", "s", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_budget_that_holds_no_sequence_ends_the_engine_with_a_message(model: str) -> None:
    options = ("--model", model, "--kv-memory", "50KiB", "--context", "128")
    with engine_process("cloud_engine", *options) as engine:
        assert engine.wait(60) == 2
        assert "Traceback" not in engine.log()
        last = engine.log().splitlines()[-1]
    assert last.startswith("error: one sequence of 128 tokens would take 1 MiB")
    assert last.endswith("or lower context to at most 80 tokens.")
