"""One slot of key-value memory, stepped."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_models import TinyModel

from edge_engine.gqa_model import GqaModel
from edge_engine.manifest import DATA_FILE, Build

IDS = list(range(5, 25))


@pytest.fixture
def model(tiny_model: Callable[..., TinyModel], emitted: Callable[..., GqaModel]) -> GqaModel:
    return emitted(tiny_model().files)


def test_forward_gives_the_last_row(model: GqaModel) -> None:
    rows = model.forward_all(IDS)
    model.reset()
    np.testing.assert_array_equal(model.forward(IDS), rows[-1])


def test_a_reset_sequence_leaves_nothing_behind(model: GqaModel) -> None:
    fresh = model.forward(IDS).copy()
    model.forward([90] * 30)
    model.reset()
    np.testing.assert_array_equal(model.forward(IDS), fresh)


def test_keys_and_values_are_appended_in_place(model: GqaModel) -> None:
    model.forward(IDS)
    for cache in model._caches.values():
        assert np.abs(cache[0, :, : len(IDS)]).min() > 0
        assert not cache[0, :, len(IDS) :].any()


def test_used_bytes_follow_the_sequence(model: GqaModel) -> None:
    assert model.kv_total_bytes == 2 * 2 * 2 * 64 * 16 * 4
    assert model.kv_used_bytes == 0
    model.forward(IDS)
    assert model.kv_used_bytes == model.kv_total_bytes * len(IDS) // 64
    model.reset()
    assert model.kv_used_bytes == 0


def test_the_window_can_be_filled_but_not_passed(model: GqaModel) -> None:
    model.forward([1] * 63)
    model.forward([1])
    with pytest.raises(ValueError, match="64 of 64"):
        model.forward([1])
    model.reset()
    model.forward([1])


def test_no_token_is_refused(model: GqaModel) -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        model.forward([])


def test_a_closed_model_has_let_go_of_its_memory(model: GqaModel) -> None:
    model.close()
    assert not hasattr(model, "_session")
    assert not model._caches


def test_details_name_what_runs(model: GqaModel) -> None:
    assert model.details["provider"] == "CPUExecutionProvider"
    assert model.details["precision"] == "fp32"
    assert model.details["step_mode"] == "ragged"
    assert model.details["threads"] == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_weights_are_mapped_not_read(
    tiny_model: Callable[..., TinyModel], emit: Callable[..., Build]
) -> None:
    build = emit(tiny_model().files)
    model = GqaModel(build, context=16, threads=1)
    assert str(build.folder / DATA_FILE) in Path("/proc/self/maps").read_text("utf-8")
    model.close()
