"""The built-in model through the edge engine: as torch computes it, only smaller."""

from typing import Any

import numpy as np
import pytest

from edge_engine.build import ensure_build
from edge_engine.open_model import open_model
from engine_core.models import ModelFiles, ModelStore
from engine_core.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

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
    model = open_model(ensure_build(ModelStore(), builtin_files, "fp32", progress=False))
    for row, token in enumerate(ids[:20]):
        np.testing.assert_allclose(model.forward([token]), torch_logits[row], atol=1e-3, rtol=0)
    np.testing.assert_allclose(model.forward(ids[20:]), torch_logits[-1], atol=1e-3, rtol=0)


def test_the_int8_graph_chooses_like_torch(
    builtin_files: ModelFiles, ids: list[int], torch_logits: Any
) -> None:
    model = open_model(ensure_build(ModelStore(), builtin_files, progress=False))
    agreed = sum(
        int(model.forward([token]).argmax() == torch_logits[row].argmax())
        for row, token in enumerate(ids)
    )
    # A smoke test on few tokens; benchmarks/edge_accuracy.py measures on thousands.
    assert agreed >= 0.9 * len(ids)
