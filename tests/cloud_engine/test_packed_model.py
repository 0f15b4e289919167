"""What a runner is told of a model, and which models it does not get."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import TINY, random_model

from cloud_engine.packed_model import PackedModel
from engine_core.errors import ModelError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_keys_and_values_are_counted_as_the_models_own_cache_has_them() -> None:
    packed = PackedModel(random_model("llama", **TINY))
    assert packed.layers == [(2, 16), (2, 16)]
    assert packed.token_bytes == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, size, bytes
    narrow = PackedModel(random_model("llama", **TINY).to(torch.bfloat16))
    assert narrow.token_bytes == packed.token_bytes // 2


def test_details_name_device_and_number_type() -> None:
    model = random_model("llama", **TINY).to(torch.bfloat16)
    details = PackedModel(model).details()
    assert (details["device"], details["dtype"]) == ("cpu", "bfloat16")
    assert details["architecture"] == "LlamaForCausalLM"
    tensors = (*model.parameters(), *model.buffers())
    assert details["weight_bytes"] == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
        (
            {
                "rope_type": "longrope",
                "factor": 4.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 32,
            },
            32,
        ),
    ],
)
def test_sequences_stay_as_short_as_rotary_embeddings_are_constant(
    rope: dict[str, Any] | None, longest: int
) -> None:
    model = random_model("llama", **TINY | ({"rope_scaling": rope} if rope else {}))
    assert PackedModel(model).longest() == longest


def test_a_model_that_does_not_say_how_long_its_context_is_has_no_limit() -> None:
    packed = PackedModel(random_model("llama", **TINY))
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(rope_parameters=None))
    packed._model = SimpleNamespace(config=config)
    assert packed.longest() is None


def test_the_witness_is_what_the_model_computes_by_itself() -> None:
    model = random_model("llama", **TINY)
    packed = PackedModel(model)
    model.set_attn_implementation("eager")
    tokens = packed.witness.tokens
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    for count in (len(tokens), 5):
        packed.check_against_witness(logits[count - 1], count)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM computes something else .* off\)"):
        packed.check_against_witness(logits[-2], len(tokens))
    with pytest.raises(ModelError):
        packed.check_against_witness(torch.full_like(logits[-1], torch.nan), len(tokens))


def test_a_model_without_keys_and_values_is_refused() -> None:
    mamba = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 97, "state_size": 4}
    with pytest.raises(ModelError, match="so this engine cannot serve it"):
        PackedModel(random_model("mamba", **mamba))
