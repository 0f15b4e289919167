import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cloud_engine.step_inputs import InputRow, StepInputs
from engine_core.types import TokenDraw

BLOCK_SIZE = 4
ROWS = 5
WIDTH = 6
MOST_TOKENS = 40
CPU = torch.device("cpu")


def make_inputs() -> tuple[StepInputs, np.ndarray]:
    table = np.zeros((ROWS + 1, WIDTH), np.int32)
    # No block's number says which place of which row it is at.
    table[:ROWS] = np.random.default_rng(3).permutation(ROWS * WIDTH).reshape(ROWS, WIDTH) + 1
    return StepInputs(MOST_TOKENS, table, BLOCK_SIZE, CPU), table


def row(place: int, begin: int, tokens: list[int], draw: TokenDraw | None = None) -> InputRow:
    return InputRow(place, begin, tokens, wants_logits=True, draw=draw)


@st.composite
def steps(draw: st.DrawFn) -> list[InputRow]:
    rows = []
    for place in draw(st.permutations(range(ROWS)))[: draw(st.integers(0, ROWS))]:
        begin = draw(st.integers(0, WIDTH * BLOCK_SIZE - 8))
        tokens = draw(st.lists(st.integers(0, 2**17), min_size=1, max_size=8))
        how = draw(
            st.none() | st.builds(TokenDraw, st.floats(0, 2, width=32), st.integers(0, 2**64 - 1))
        )
        rows.append(InputRow(place, begin, tokens, draw(st.booleans()), how))
    return rows


@given(before=steps(), rows=steps(), padding=st.integers(0, MOST_TOKENS))
def test_every_token_and_row_is_where_it_belongs_whatever_the_step_before(
    before: list[InputRow], rows: list[InputRow], padding: int
) -> None:
    inputs, table = make_inputs()
    total = sum(len(row.tokens) for row in rows)
    size = min(MOST_TOKENS, total + padding)
    inputs.fill(before, MOST_TOKENS)
    inputs.fill(rows, size)
    views = inputs.view(size)

    stream = [
        (token, row.begin + number, row.place)
        for row in rows
        for number, token in enumerate(row.tokens)
    ]
    rest = size - total
    slots = [
        int(table[place, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE
        for _, at, place in stream
    ]
    assert views.tokens.tolist() == [[token for token, _, _ in stream] + [0] * rest]
    assert views.positions.tolist() == [[at for _, at, _ in stream] + [0] * rest]
    assert views.slots.tolist() == slots + [0] * rest
    assert views.contexts.tolist() == [at + 1 for _, at, _ in stream] + [1] * rest
    assert views.table_rows.tolist() == [place for _, _, place in stream] + [ROWS] * rest

    count = min(size, ROWS)
    ends = np.cumsum([len(row.tokens) for row in rows])
    wanted = [(row, int(end)) for row, end in zip(rows, ends, strict=True) if row.wants_logits]
    draws = [row.draw or TokenDraw(0.0, 0) for row, _ in wanted]
    rest = count - len(wanted)
    assert views.logit_rows.tolist() == [end - 1 for _, end in wanted] + [0] * rest
    assert views.temperatures.tolist() == [draw.temperature for draw in draws] + [0.0] * rest
    halves = [(low % 2**32, high % 2**32) for low, high in views.seeds.tolist()]
    assert halves == [(draw.seed % 2**32, draw.seed >> 32) for draw in draws] + [(0, 0)] * rest
    counters = [row.begin + len(row.tokens) for row, _ in wanted]
    assert views.counters.tolist() == counters + [0] * rest


def test_a_token_is_drawn_with_the_same_counter_when_its_sequence_is_computed_anew() -> None:
    inputs, _ = make_inputs()
    inputs.fill([row(0, 9, [7])], 1)
    once = inputs.view(1).counters.item()
    inputs.fill([row(3, 0, list(range(10)))], 10)
    assert inputs.view(10).counters[0] == once == 10


def test_views_of_one_size_are_the_same_memory_at_every_step() -> None:
    inputs, _ = make_inputs()
    inputs.fill([row(0, 0, [1, 2])], 8)
    before = [view.data_ptr() for view in inputs.view(8)]
    inputs.fill([row(1, 4, [3]), row(2, 0, [4, 5])], 8)
    assert [view.data_ptr() for view in inputs.view(8)] == before


def test_blocks_that_a_sequence_got_since_are_used() -> None:
    inputs, table = make_inputs()
    table[2, 1] = 99
    inputs.fill([row(2, BLOCK_SIZE, [1])], 1)
    assert inputs.view(1).slots.tolist() == [99 * BLOCK_SIZE]


@pytest.mark.parametrize("size", [1, MOST_TOKENS + 1])
def test_a_step_that_does_not_fit_is_refused(size: int) -> None:
    inputs, _ = make_inputs()
    with pytest.raises(ValueError, match=f"2 tokens do not fit into {size} columns of 40"):
        inputs.fill([row(0, 0, [1, 2])], size)
