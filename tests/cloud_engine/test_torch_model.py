"""Stepping a transformers model equals running it over the whole sequence at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY, save_tiny_model

from engine_core.errors import EngineFailureError, ModelError

GPT2: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 97,
    "n_positions": 128,
}
# Sees eight tokens back, so that a cache that forgets too much or too little shows.
SLIDING: dict[str, Any] = TINY | {"sliding_window": 8}
FAMILIES = [("llama", TINY), ("qwen3", TINY), ("mistral", SLIDING), ("gpt2", GPT2)]


@pytest.fixture(params=FAMILIES, ids=lambda family: family[0])
def tiny(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a tiny random model of one family after the other."""
    family, config = request.param
    return save_tiny_model(tmp_path / family, family, **config)


def stepper(torch_model: Any, context: int | None = None) -> Any:
    from cloud_engine.torch_model import TorchModel

    return TorchModel(torch_model, context)


def token_ids(count: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(3).integers(0, 97, count)]


@pytest.mark.parametrize("chunks", [(40,), (1,) * 40, (17, 1, 1, 20, 1)], ids=str)
def test_logits_do_not_depend_on_how_a_sequence_comes_in(
    tiny: Any, chunks: tuple[int, ...]
) -> None:
    ids = token_ids(40)
    whole = tiny.logits(ids)
    model = stepper(tiny.torch_model)
    done = 0
    for chunk in chunks:
        logits = model.forward(ids[done : done + chunk])
        done += chunk
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, whole[done - 1], atol=1e-4)


def test_reset_forgets_the_sequence(tiny: Any) -> None:
    model = stepper(tiny.torch_model)
    first = model.forward(token_ids(9))
    model.forward([1, 2, 3])
    model.reset()
    np.testing.assert_array_equal(model.forward(token_ids(9)), first)


def test_kv_bytes_are_those_of_the_cache(tmp_path: Path) -> None:
    tiny = save_tiny_model(tmp_path / "llama", "llama", **TINY)
    model = stepper(tiny.torch_model, context=100)
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, head size, bytes
    assert model.kv_token_bytes == per_token


def test_context_is_the_models_own_or_a_smaller_one(tmp_path: Path) -> None:
    tiny = save_tiny_model(tmp_path / "gpt2", "gpt2", **GPT2)
    assert stepper(tiny.torch_model).context_window == 128
    assert stepper(tiny.torch_model, 64).context_window == 64
    with pytest.raises(ModelError, match="a context of 129 tokens is more than the 128"):
        stepper(tiny.torch_model, 129)


def test_details_name_device_and_number_type(tmp_path: Path) -> None:
    import torch

    tiny = save_tiny_model(tmp_path / "llama", "llama", **TINY)
    details = stepper(tiny.torch_model.to(torch.bfloat16)).details
    assert (details["device"], details["dtype"]) == ("cpu", "bfloat16")
    assert details["architecture"] == "LlamaForCausalLM"
    assert details["weight_bytes"] == sum(p.nbytes for p in tiny.torch_model.parameters())


def test_full_device_fails_the_request_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    tiny = save_tiny_model(tmp_path / "llama", "llama", **TINY)
    model = stepper(tiny.torch_model)

    def full(**_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tiny.torch_model, "forward", full)
        with pytest.raises(EngineFailureError, match="no memory left for a sequence of 5 tokens"):
            model.forward(token_ids(5))
    model.reset()
    assert model.forward(token_ids(5)).shape == (97,)


def test_model_without_keys_and_values_is_refused(tmp_path: Path) -> None:
    mamba: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 97,
        "state_size": 4,
    }
    tiny = save_tiny_model(tmp_path / "mamba", "mamba", **mamba)
    with pytest.raises(ModelError):
        stepper(tiny.torch_model, 64)
