"""The built-in model through the edge engine: as torch computes it, only smaller."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_room import room

from edge_engine.build import ensure_build
from edge_engine.manifest import Precision
from edge_engine.run_inputs import Chunk
from edge_engine.runner import Runner
from engine_core.models import ModelFiles, ModelStore
from engine_core.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

PROSE = Path(__file__).parents[2] / "benchmarks" / "data" / "prose.txt"
WINDOW = 512
TEXT = (
    "The tide gate stood at the mouth of the creek, and twice a day it shut by itself. When the "
    "sea rose against it the two oak doors swung together; when the ebb began they opened. Nobody "
    "had to be there. 潮水每天涨落两次,闸门自己开合。 for n in range(10): print(n ** 2)"
)


@pytest.fixture(scope="module")
def ids(builtin_files: ModelFiles) -> list[int]:
    return Tokenizer.load(builtin_files).encode(TEXT)


@pytest.fixture(scope="module")
def torch_logits(builtin_files: ModelFiles, ids: list[int]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    path = builtin_files.path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].numpy()


def test_the_float32_graph_equals_torch(
    builtin_files: ModelFiles, ids: list[int], torch_logits: Any
) -> None:
    build = ensure_build(ModelStore(), builtin_files, "fp32", progress=False)
    runner = Runner(build, room(len(ids)))
    np.testing.assert_allclose(runner.all_logits(ids), torch_logits, atol=1e-3, rtol=0)


def test_the_int8_graph_is_as_good_as_the_float32_graph(builtin_files: ModelFiles) -> None:
    """The gate of `benchmarks/edge_accuracy.py`, on a third of its text."""
    text = Tokenizer.load(builtin_files).encode(PROSE.read_text("utf-8"))
    windows = [text[begin : begin + WINDOW + 1] for begin in range(0, 2048, WINDOW)]
    loss, choices = {}, {}
    for precision in ("fp32", "int8"):
        build = ensure_build(ModelStore(), builtin_files, precision, progress=False)
        runner = Runner(build, room(WINDOW))
        logits = np.concatenate([runner.all_logits(window[:-1], chunk=64) for window in windows])
        following = np.concatenate([window[1:] for window in windows])
        largest = logits.max(axis=1)
        sums = np.log(np.exp(logits - largest[:, None]).sum(axis=1)) + largest
        loss[precision] = float((sums - logits[np.arange(len(following)), following]).mean())
        choices[precision] = logits.argmax(axis=1)
    assert np.exp(loss["int8"] - loss["fp32"]) <= 1.01
    assert (choices["int8"] == choices["fp32"]).mean() >= 0.96


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_chunks_and_company_change_no_bit(
    precision: Precision, builtin_files: ModelFiles, ids: list[int]
) -> None:
    build = ensure_build(ModelStore(), builtin_files, precision, progress=False)
    runner = Runner(build, room(len(ids), slots=4))
    whole = runner.all_logits(ids)
    for chunk in (1, 7):
        np.testing.assert_array_equal(runner.all_logits(ids, chunk=chunk), whole)
    for place in (1, 3):
        runner.step([Chunk(place, 0, ids[place:-1])])
    company = [
        Chunk(place, len(ids) - 1 - place, ids[-1:], wants_logits=True, generated=True)
        for place in (1, 3)
    ]
    last = Chunk(0, len(ids) - 1, ids[-1:], wants_logits=True, generated=True)
    np.testing.assert_array_equal(runner.step([last, *company])[0], whole[-1])
