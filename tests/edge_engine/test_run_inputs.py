"""The inputs of one run, for any rows that may share one."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_engine.manifest import KvPrecision
from edge_engine.run_inputs import Chunk, RunInputs, RunShape

SLOTS = 6
CAPACITY = 64


@st.composite
def runs(draw: st.DrawFn) -> list[Chunk]:
    """Return rows of equal length in different slots, as many as the slots at most."""
    tokens = draw(st.integers(1, 9))
    places = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, unique=True))
    return [
        Chunk(
            place,
            draw(st.integers(0, CAPACITY - tokens - 2)),
            draw(st.lists(st.integers(0, 96), min_size=tokens, max_size=tokens)),
            wants_logits=draw(st.booleans()),
        )
        for place in places
    ]


def filled(
    rows: list[Chunk], *, ragged: bool, logits: int, kv: KvPrecision = "float32"
) -> tuple[RunShape, dict[str, np.ndarray]]:
    shape = RunShape.of(rows, ragged=ragged, logits=logits)
    inputs = RunInputs(shape, capacity=CAPACITY, ragged=ragged, kv=kv)
    ends = [10 * (shape.first + slot) for slot in range(shape.slots)]
    # What a run of the same shape left must not shine through.
    other = [replace(row, begin=1, tokens=row.tokens[::-1]) for row in rows[::-1]]
    inputs.fill(other, ends)
    inputs.fill(rows, ends)
    return shape, inputs.arrays


@given(rows=runs())
def test_every_token_stands_in_the_table_and_is_found_again(rows: list[Chunk]) -> None:
    shape, arrays = filled(rows, ragged=True, logits=sum(row.wants_logits for row in rows))
    ids = [token for row in rows for token in row.tokens]
    np.testing.assert_array_equal(arrays["input_ids"], ids)
    table = arrays["input_ids"][arrays["attention_rows"]]
    assert table.shape == (shape.slots, shape.queries)
    for row in rows:
        repeat = row.tokens[-1:] * (len(row.tokens) % 2)
        np.testing.assert_array_equal(table[row.place - shape.first], [*row.tokens, *repeat])
    back = arrays["attention_rows"].ravel()[arrays["packed_rows"]]
    np.testing.assert_array_equal(back, np.arange(len(ids)))


@given(rows=runs())
def test_every_sequence_has_an_even_number_of_queries_or_none(rows: list[Chunk]) -> None:
    shape, arrays = filled(rows, ragged=True, logits=sum(row.wants_logits for row in rows))
    begins = {row.place - shape.first: row.begin for row in rows}
    for slot in range(shape.slots):
        queries, length = arrays["query_seqlens"][slot], arrays["seqlens_k"][slot] + 1
        if slot in begins:
            assert queries == shape.queries
            assert queries % 2 == 0
            assert length == begins[slot] + queries
        else:
            assert (queries, length) == (0, 1)
        # What GroupQueryAttention asks for: room for the padded chunk behind what is cached.
        assert length - queries + shape.queries <= CAPACITY
    assert arrays["total_sequence_length"] == CAPACITY


@given(rows=runs())
def test_over_int8_the_repeat_has_a_place_but_does_not_count(rows: list[Chunk]) -> None:
    shape, arrays = filled(rows, ragged=True, logits=len(rows), kv="int8")
    assert shape.queries % 2 == 0
    for row in rows:
        slot = row.place - shape.first
        assert arrays["query_seqlens"][slot] == shape.tokens
        assert arrays["seqlens_k"][slot] + 1 == row.begin + shape.tokens


@given(rows=runs())
def test_logits_are_asked_for_where_they_are_wanted(rows: list[Chunk]) -> None:
    wanting = [i for i, row in enumerate(rows) if row.wants_logits]
    shape, arrays = filled(rows, ragged=True, logits=len(wanting))
    np.testing.assert_array_equal(
        arrays["logit_rows"], [(i + 1) * shape.tokens - 1 for i in wanting]
    )
    everywhere, arrays = filled(rows, ragged=True, logits=shape.rows * shape.tokens)
    np.testing.assert_array_equal(arrays["logit_rows"], np.arange(everywhere.logits))


@given(begins=st.dictionaries(st.integers(0, SLOTS - 1), st.integers(1, 50), min_size=1))
def test_without_query_seqlens_drawn_tokens_have_one_query_and_idle_slots_write_behind_their_end(
    begins: dict[int, int],
) -> None:
    rows = [Chunk(place, begin, [7], True, generated=True) for place, begin in begins.items()]
    shape, arrays = filled(rows, ragged=False, logits=len(rows))
    assert shape.queries == 1
    assert "query_seqlens" not in arrays
    ends = {shape.first + slot: 10 * (shape.first + slot) for slot in range(shape.slots)}
    lengths = [(ends | begins)[place] for place in sorted(ends)]
    np.testing.assert_array_equal(arrays["seqlens_k"], lengths)
    assert arrays["total_sequence_length"] == max(lengths) + 1


@given(tokens=st.integers(1, 9))
def test_without_query_seqlens_a_prompt_still_has_an_even_number_of_queries(tokens: int) -> None:
    row = Chunk(3, 20, [7] * tokens)
    shape, arrays = filled([row], ragged=False, logits=0)
    assert shape.queries == tokens + tokens % 2
    assert arrays["total_sequence_length"] == 20 + shape.queries == arrays["seqlens_k"][0] + 1
