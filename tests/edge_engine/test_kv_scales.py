"""Keys and values in int8: the scales, and what rounding to them costs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kv_room import room
from numpy.typing import NDArray
from tiny_models import TinyModel

from edge_engine.arch import LlamaShape, llama_shape
from edge_engine.kv_scales import ROOM, ROOM_OF_A_VALUE, kv_scales
from edge_engine.manifest import Build
from edge_engine.run_inputs import Chunk
from edge_engine.runner import Runner
from edge_engine.weights import open_weights
from engine_core.models import ModelFiles

IDS = np.random.default_rng(5).integers(0, 97, 40).tolist()


def shape_of(files: ModelFiles) -> LlamaShape:
    return llama_shape(open_weights(files).config)


def torch_caches(tiny: TinyModel, ids: list[int]) -> dict[str, NDArray[np.float32]]:
    """Return torch's keys and values `[kv_heads, tokens, head_dim]` of every layer."""
    import torch

    with torch.no_grad():
        past: Any = tiny.torch_model(torch.tensor([ids]), use_cache=True).past_key_values
    kept = {}
    for layer, cache in enumerate(past.layers):
        kept[f"key_{layer}"] = cache.keys[0].numpy()
        kept[f"value_{layer}"] = cache.values[0].numpy()
    return kept


@pytest.mark.parametrize("ragged", [True, False])
def test_scales_leave_room_above_what_torch_sees(
    ragged: bool, tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    tiny = tiny_model("qwen3")
    texts = [IDS, IDS[:7][::-1]]
    seen = [torch_caches(tiny, ids) for ids in texts]
    build = emit(tiny.files, ragged=ragged)
    scales = kv_scales(build.folder, shape_of(tiny.files), texts, ragged=ragged)
    assert scales.keys() == seen[0].keys()
    for name, scale in scales.items():
        peak = np.maximum(*(np.abs(sizes(name, kept)).max(axis=1, keepdims=True) for kept in seen))
        wanted = peak * ROOM
        if name.startswith("value"):
            wanted = np.maximum(peak * ROOM_OF_A_VALUE, wanted.max(axis=-1, keepdims=True))
        np.testing.assert_allclose(scale, wanted / 127, rtol=1e-4)


def sizes(name: str, kept: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return values as they are, and of keys the length of the pair that is turned together."""
    values = kept[name]
    if name.startswith("value"):
        return values
    half = values.shape[-1] // 2
    return np.sqrt(np.square(values) + np.square(np.roll(values, half, axis=-1)))


def test_where_a_text_stands_changes_no_scale_of_its_keys(
    tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    tiny = tiny_model()
    build = emit(tiny.files)
    early, late = (
        kv_scales(build.folder, shape_of(tiny.files), [ids], ragged=True)["key_0"]
        for ids in ([3] * 5, [3] * 100)
    )
    np.testing.assert_allclose(early, late, rtol=1e-4)


@pytest.mark.parametrize("ragged", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_cache_holds_keys_and_values_in_units_of_their_scales(
    family: str,
    ragged: bool,
    tiny_model: Callable[..., TinyModel],
    emit: Callable[..., Build],
) -> None:
    tiny = tiny_model(family)
    plain = emit(tiny.files, ragged=ragged)
    scales = kv_scales(plain.folder, shape_of(tiny.files), [IDS], ragged=ragged)
    runner = Runner(emit(tiny.files, ragged=ragged, kv="int8", text=IDS), room(64), threads=1)
    logits = runner.all_logits(IDS)
    kept = torch_caches(tiny, IDS)
    # What the first layer keeps depends on nothing that was rounded before.
    for name in ("key_0", "value_0"):
        cache = runner._caches[f"past_{name}"][0, :, : len(IDS)]
        assert cache.dtype == np.int8
        np.testing.assert_allclose(cache * scales[name], kept[name], atol=scales[name].max() * 0.51)
    # Logits of a random model are around 10 and rounding moves them by some hundredths.
    exact = tiny.logits(IDS)
    error = np.sqrt(np.mean(np.square(logits - exact)) / np.mean(np.square(exact)))
    assert 0 < error < 0.02


def test_a_channel_that_is_always_zero_has_a_scale(
    tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    import torch

    tiny = tiny_model()
    with torch.no_grad():
        tiny.torch_model.model.layers[0].self_attn.v_proj.weight[3] = 0
    tiny.torch_model.save_pretrained(tiny.files.path)
    build = emit(tiny.files)
    scales = kv_scales(build.folder, shape_of(tiny.files), [IDS], ragged=True)
    assert scales["value_0"][0, 0, 3] > 0
    runner = Runner(emit(tiny.files, kv="int8", text=IDS), room(64), threads=1)
    assert np.isfinite(runner.all_logits(IDS)).all()


def test_a_token_takes_a_quarter_of_the_memory(
    tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    files = tiny_model().files
    full = Runner(emit(files), room(64, 2), threads=1)
    small = Runner(emit(files, kv="int8"), room(64, 2), threads=1)
    assert small.kv_token_bytes * 4 == full.kv_token_bytes
    assert small.kv_total_bytes * 4 == full.kv_total_bytes
    assert small.kv_total_bytes == sum(cache.nbytes for cache in small._caches.values())
    assert (full.details["kv"], small.details["kv"]) == ("float32", "int8")


def test_company_on_many_threads_changes_no_bit_of_a_long_text(
    tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    # Long enough for several blocks of keys, and more threads than heads: where a decode step with
    # a single place would be spread over the threads.
    tiny = tiny_model(max_position_embeddings=9000, num_attention_heads=2, num_key_value_heads=1)
    build = emit(tiny.files, kv="int8")
    ids = np.random.default_rng(6).integers(0, 97, 8400).tolist()
    runners = [Runner(build, room(8500), threads=threads) for threads in (1, 6)]
    whole, other = (runner.all_logits(ids, chunk=2800)[-3:] for runner in runners)
    np.testing.assert_array_equal(whole, other)
    for runner in runners:
        for place, token in enumerate(ids[-3:]):
            row = Chunk(0, len(ids) - 3 + place, [token], wants_logits=True, generated=True)
            np.testing.assert_array_equal(runner.step([row])[0], whole[place])
