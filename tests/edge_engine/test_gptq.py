"""Rounding weights: never far from the nearest level, and closer where activations are."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_engine import gptq
from edge_engine.gptq import round_weight


def correlated(tokens: int, inputs: int) -> np.ndarray:
    """Return rows that lie near a few directions, as those of a model do."""
    rng = np.random.default_rng(inputs)
    directions = rng.standard_normal((inputs, inputs)) * 0.98 ** np.arange(inputs)
    rows: np.ndarray = (rng.standard_normal((tokens, inputs)) @ directions.T).astype(np.float32)
    return rows


def weight(outputs: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(outputs).standard_normal((outputs, inputs)).astype(np.float32)


def moved(exact: np.ndarray, rows: np.ndarray, rounded: gptq.RoundedWeight) -> float:
    """Return how far the outputs moved, as a root mean square."""
    return float(np.sqrt(np.square(rows @ (rounded.restored() - exact).T).mean()))


finite = st.floats(-1e4, 1e4, width=32)


@settings(deadline=None)
@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=20), elements=finite)
)
def test_without_activations_every_weight_takes_the_nearest_level(exact: np.ndarray) -> None:
    rounded = round_weight(exact)
    steps = np.broadcast_to(rounded.scales[:, None], exact.shape)
    assert (np.abs(rounded.restored() - exact) <= steps * 0.501).all()
    assert (rounded.values[exact == 0] == 0).all()


@settings(deadline=None)
@given(st.data())
def test_with_any_activations_levels_stay_in_range(data: Any) -> None:
    outputs, inputs, tokens = data.draw(st.tuples(*[st.integers(1, 12)] * 3))
    exact = data.draw(hnp.arrays(np.float32, (outputs, inputs), elements=finite))
    rows = data.draw(hnp.arrays(np.float32, (tokens, inputs), elements=finite))
    rounded = round_weight(exact, rows)
    assert np.isfinite(rounded.scales).all()
    assert np.abs(rounded.values.astype(int)).max() <= 127


@pytest.mark.parametrize("tokens", [40, 400])
def test_errors_cancel_out_on_the_activations(tokens: int) -> None:
    exact, rows = weight(60, 160), correlated(tokens, 160)
    nearest = moved(exact, rows, round_weight(exact))
    assert moved(exact, rows, round_weight(exact, rows)) < 0.7 * nearest


def test_errors_cancel_out_on_activations_that_were_not_seen() -> None:
    exact, rows = weight(60, 160), correlated(800, 160)
    rounded = round_weight(exact, rows[:400])
    nearest = moved(exact, rows[400:], round_weight(exact))
    assert moved(exact, rows[400:], rounded) < 0.7 * nearest


def test_a_weight_in_many_pieces_is_rounded_nearly_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, rows = weight(60, 160), correlated(400, 160)
    whole = moved(exact, rows, round_weight(exact, rows))
    monkeypatch.setattr(gptq, "_SPAN", 60)
    monkeypatch.setattr(gptq, "_WEIGHTS_AT_ONCE", 1000)
    assert moved(exact, rows, round_weight(exact, rows)) < 1.5 * whole


def test_where_no_activation_ever_was_weights_take_the_nearest_level() -> None:
    exact = weight(10, 50)
    rows = np.zeros((5, 50), np.float32)
    np.testing.assert_array_equal(round_weight(exact, rows).values, round_weight(exact).values)


def test_an_output_without_weights_stays_without() -> None:
    exact = weight(3, 50)
    exact[1] = 0
    assert (round_weight(exact, correlated(20, 50)).values[1] == 0).all()
