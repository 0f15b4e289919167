"""What a calibration run reads and sees."""

from collections.abc import Callable

import numpy as np
import pytest
from tiny_models import TinyModel
from tiny_tokenizer import BYTE_VOCABULARY, save_byte_tokenizer

from edge_engine.arch import llama_shape
from edge_engine.calibrate import activations, calibration_ids, watched_values
from edge_engine.manifest import Build
from edge_engine.weights import open_weights

IDS = np.random.default_rng(8).integers(0, 97, 40).tolist()


@pytest.mark.parametrize("ragged", [True, False])
def test_activations_are_those_that_torch_sees(
    ragged: bool, tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    tiny = tiny_model()
    shape = llama_shape(open_weights(tiny.files).config)
    layers = tiny.torch_model.model.layers
    readers = {
        "normed_1": layers[1].self_attn.q_proj,
        "attended_rows_0": layers[0].self_attn.o_proj,
        "mlp_normed_1": layers[1].mlp.up_proj,
        "product_0": layers[0].mlp.down_proj,
        "normed_2": tiny.torch_model.lm_head,
    }
    seen: dict[str, list[np.ndarray]] = {name: [] for name in readers}
    for name, linear in readers.items():
        linear.register_forward_pre_hook(
            lambda _, inputs, name=name: seen[name].append(inputs[0][0].numpy())
        )
    texts = [IDS * 2, IDS[:7]]  # longer and shorter than a chunk
    for ids in texts:
        tiny.logits(ids)
    build = emit(tiny.files, ragged=ragged, extra_outputs=watched_values(shape))
    found = activations(build.folder, shape, texts, ragged=ragged)
    assert found.keys() == set(watched_values(shape))
    assert {len(rows) for rows in found.values()} == {87}
    for name, rows in seen.items():
        np.testing.assert_allclose(found[name], np.concatenate(rows), atol=1e-4)


def test_calibration_reads_a_text_and_a_conversation(tiny_model: Callable[..., TinyModel]) -> None:
    files = tiny_model(vocab_size=BYTE_VOCABULARY).files
    save_byte_tokenizer(files.path)
    text, conversation = calibration_ids(files, limit=100)
    assert len(text) == 100
    assert 0 < len(conversation) <= 100
    assert text != conversation


def test_a_model_without_a_chat_template_is_calibrated_on_text_alone(
    tiny_model: Callable[..., TinyModel],
) -> None:
    files = tiny_model(vocab_size=BYTE_VOCABULARY).files
    save_byte_tokenizer(files.path)
    (files.path / "tokenizer_config.json").unlink()
    assert len(calibration_ids(files, limit=100)) == 1
