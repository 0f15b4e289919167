"""The split step mode, once on the runtime that has nothing else: `onnxruntime-gpu`, on its CPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, engine_process
from pip_folder import pip_folder
from tiny_models import TINY, save_tiny_model
from tiny_tokenizer import BYTE_VOCABULARY, save_byte_tokenizer

VERSION = "1.31.1"
"""The last one published; `constraints.txt` cannot hold it, since it takes the same import name."""
PROMPTS = ["The tide comes in", "and goes", "out again, twice a day, " * 4, "x"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpu_runtime(request: pytest.FixtureRequest) -> Path:
    """Return a folder with the package, kept between runs: it is 340 MB."""
    return pip_folder(request, f"onnxruntime-gpu=={VERSION}", "--no-deps")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_model(folder, "llama", **(TINY | {"vocab_size": BYTE_VOCABULARY}))
    save_byte_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["float32", "int8"])
def engines(
    request: pytest.FixtureRequest,
    gpu_runtime: Path,
    model: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Yield the engine on the GPU package and the one on this environment's runtime."""
    options = ("--model", model, "--slots", "4", "--threads", "1", "--kv", request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHE_DIRECTORY", str(tmp_path_factory.mktemp("cache")))
        with engine_process("edge_engine", *options) as here:
            here.wait_until_ready()
            # Found before the package of the same name in this environment.
            patch.setenv("PYTHONPATH", str(gpu_runtime), prepend=":")
            with engine_process("edge_engine", *options) as there:
                there.wait_until_ready()
                yield there, here


def complete(engine: EngineProcess, prompt: str) -> dict[str, Any]:
    answer = engine.http.post(
        "/v1/completions",
        json={"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 0},
    )
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_each_runtime_gets_the_steps_that_it_can_do(
    engines: tuple[EngineProcess, EngineProcess],
) -> None:
    there, here = (engine.stats()["details"] for engine in engines)
    assert there["onnxruntime"] == VERSION
    assert there["step_mode"] == "split"
    assert there["provider"] == "CPUExecutionProvider"
    assert here["step_mode"] == "ragged"


def test_both_step_modes_say_the_same(engines: tuple[EngineProcess, EngineProcess]) -> None:
    for prompt in PROMPTS:
        there, here = (complete(engine, prompt) for engine in engines)
        assert there["text"] == here["text"]
        assert there["logprobs"]["token_logprobs"] == pytest.approx(
            here["logprobs"]["token_logprobs"], abs=1e-3
        )


def test_company_changes_nothing_in_split_steps(
    engines: tuple[EngineProcess, EngineProcess],
) -> None:
    engine, _ = engines
    alone = [complete(engine, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: complete(engine, prompt), PROMPTS))
    assert together == alone
