"""Which sequences take part in a step: order, fairness, endings in every phase, no leaks."""

from collections.abc import Sequence as Items

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.errors import OverloadedError
from engine_core.scheduler import Placement, Scheduler, Sequence, StepRow
from engine_core.types import PRIORITIES

CHUNK, BUDGET = 4, 8


class FakeSpace:
    """Places that share room for some tokens, and notice when they are given or back twice."""

    def __init__(self, places: int, room: int = 10**6) -> None:
        self.places = places
        self.room = room
        self.lengths: dict[int, int] = {}
        self.busy: set[int] = set()
        self.released: list[tuple[int, list[int]]] = []
        self.generated: list[int] = []

    @property
    def free(self) -> int:
        return self.places - len(self.busy)

    def admit(self, tokens: list[int], salt: str) -> Placement | None:
        assert tokens
        if not self.free or sum(self.lengths.values()) + len(tokens) > self.room:
            return None
        place = min(set(range(self.places)) - self.busy)
        self.busy.add(place)
        self.lengths[place] = len(tokens)
        # A salt "n" stands for a prefix of n tokens that is there already.
        return Placement(place, min(int(salt or 0), len(tokens) - 1))

    def grow(self, place: int, length: int) -> bool:
        if sum(self.lengths.values()) - self.lengths[place] + length > self.room:
            return False
        self.lengths[place] = length
        return True

    def release(self, place: int, tokens: list[int], generated: int) -> None:
        self.busy.remove(place)
        del self.lengths[place]
        self.generated.append(generated)
        self.released.append((place, tokens))


def sequence(length: int, priority: str = "standard", **options: object) -> Sequence:
    return Sequence(
        tokens=list(range(length)),
        priority=PRIORITIES[priority],
        **options,  # type: ignore[arg-type]
    )


def scheduler(
    places: int = 4, max_waiting: int = 100, room: int = 10**6, quiet_budget: int | None = None
) -> tuple[Scheduler, FakeSpace]:
    space = FakeSpace(places, room)
    planner = Scheduler(
        space, max_waiting=max_waiting, chunk=CHUNK, budget=BUDGET, quiet_budget=quiet_budget
    )
    return planner, space


def step(planner: Scheduler) -> list[StepRow]:
    """Compute the next step; each sequence at its end gets a token."""
    rows = planner.plan()
    planner.computed(rows)
    for row in rows:
        if row.wants_logits:
            planner.append(row.sequence, 7)
    return rows


def shape(rows: Items[StepRow]) -> list[tuple[int, int]]:
    return [(row.place, len(row.tokens)) for row in rows]


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    planner, _ = scheduler()
    asked = sequence(11)
    planner.add(asked)
    assert [shape(step(planner)) for _ in range(4)] == [[(0, 8)], [(0, 3)], [(0, 1)], [(0, 1)]]
    assert asked.tokens == [*range(11), 7, 7, 7]


def test_only_the_end_of_a_sequence_wants_logits() -> None:
    planner, _ = scheduler()
    planner.add(sequence(11))
    assert [row.wants_logits for _ in range(3) for row in step(planner)] == [False, True, True]


def test_sequences_that_generate_come_first_and_always_take_part() -> None:
    planner, _ = scheduler(places=12)
    for _ in range(10):
        planner.add(sequence(1))
    step(planner)
    planner.add(sequence(50))
    rows = step(planner)
    assert shape(rows) == [*((place, 1) for place in range(10)), (10, CHUNK)]


def test_chunks_go_round_so_that_a_long_prompt_holds_nobody_up() -> None:
    planner, _ = scheduler()
    planner.add(sequence(100))
    planner.add(sequence(100))
    assert shape(step(planner)) == [(0, 4), (1, 4)]
    planner.add(sequence(100))
    assert shape(step(planner)) == [(0, 4), (1, 4)]
    # The third has waited longest for its turn.
    assert shape(step(planner)) == [(2, 4), (0, 4)]


def test_a_prompt_that_ends_goes_ahead_of_a_long_one_every_other_step() -> None:
    planner, _ = scheduler(places=8)
    planner.add(sequence(100))
    step(planner)
    planner.add(sequence(3))
    assert shape(step(planner)) == [(1, 3)]
    planner.add(sequence(2))
    assert shape(step(planner)) == [(1, 1), (0, 4), (2, 2)]
    planner.add(sequence(2))
    assert shape(step(planner)) == [(1, 1), (2, 1), (3, 2)]


def test_a_prompt_that_ends_does_not_go_ahead_of_a_higher_class() -> None:
    planner, _ = scheduler()
    planner.add(sequence(12, "critical"))
    step(planner)
    planner.add(sequence(3, "batch"))
    assert shape(step(planner)) == [(0, 4), (1, 3)]


def test_a_higher_class_is_admitted_and_prefilled_first() -> None:
    planner, _ = scheduler(places=2)
    planner.add(sequence(100, "batch"))
    planner.add(sequence(20, "critical"))
    planner.add(sequence(20, "critical"))
    assert shape(step(planner)) == [(0, 4), (1, 4)]
    assert planner.waiting == 1


def test_a_lower_class_gets_what_a_higher_one_leaves_of_a_step() -> None:
    planner, _ = scheduler()
    planner.add(sequence(100, "batch"))
    planner.add(sequence(BUDGET + CHUNK, "critical"))
    assert shape(step(planner)) == [(0, BUDGET)]
    assert shape(step(planner)) == [(0, CHUNK)]
    assert shape(step(planner)) == [(0, 1), (1, CHUNK)]


def test_arrival_order_inside_a_class() -> None:
    planner, _ = scheduler(places=1)
    asked = [sequence(1) for _ in range(3)]
    for one in asked:
        planner.add(one)
    served = []
    for _ in asked:
        (row,) = step(planner)
        served.append(row.sequence)
        planner.leave(row.sequence)
    assert served == asked


def test_a_prefix_that_is_in_place_is_not_computed() -> None:
    planner, _ = scheduler()
    asked = sequence(10, salt="9")
    planner.add(asked)
    (row,) = step(planner)
    assert (row.begin, row.tokens, row.wants_logits, asked.cached) == (9, [9], True, 9)


def test_more_than_may_wait_are_refused_and_a_free_place_is_one_more() -> None:
    planner, _ = scheduler(places=2, max_waiting=1)
    for _ in range(3):
        planner.add(sequence(1))
    with pytest.raises(OverloadedError, match="3 requests are waiting"):
        planner.add(sequence(1))
    step(planner)
    assert (planner.running, planner.waiting) == (2, 1)
    with pytest.raises(OverloadedError):
        planner.add(sequence(1))


def test_a_waiting_sequence_leaves_its_list() -> None:
    planner, space = scheduler(places=1)
    first, second = sequence(1), sequence(1)
    planner.add(first)
    planner.add(second)
    step(planner)
    planner.leave(second)
    assert (planner.waiting, planner.running, space.released) == (0, 1, [])


def test_what_is_drawn_is_told_from_the_prompt() -> None:
    planner, space = scheduler()
    asked = sequence(5, salt="4")
    planner.add(asked)
    assert [row.generated for _ in range(3) for row in step(planner)] == [False, True, True]
    planner.leave(asked)
    assert (space.released, space.generated) == ([(0, [0, 1, 2, 3, 4, 7, 7])], [2])


def test_a_sequence_that_leaves_between_steps_frees_its_place_at_once() -> None:
    planner, space = scheduler()
    asked = sequence(20)
    planner.add(asked)
    step(planner)
    planner.leave(asked)
    planner.leave(asked)
    assert space.released == [(0, list(range(8)))]
    assert planner.running == 0


def test_a_sequence_that_leaves_during_a_step_keeps_its_place_until_the_end_of_it() -> None:
    planner, space = scheduler()
    asked = sequence(5)
    planner.add(asked)
    rows = planner.plan()
    planner.leave(asked)
    assert space.busy == {0}
    planner.computed(rows)
    assert (space.busy, space.released) == (set(), [(0, [0, 1, 2, 3, 4])])


def test_what_a_broken_step_left_is_not_used_again() -> None:
    planner, space = scheduler()
    good, bad = sequence(4), sequence(4)
    planner.add(good)
    planner.add(bad)
    rows = planner.plan()
    planner.leave(bad, keep=False)
    planner.computed([row for row in rows if row.sequence is good])
    assert space.released == [(1, [])]
    assert good.computed == 4


def test_the_latest_of_the_lowest_class_makes_room_and_begins_anew() -> None:
    planner, _ = scheduler(room=13)
    first, later, latest = sequence(4), sequence(3, "sheddable"), sequence(3, "sheddable")
    for one in (first, later, latest):
        planner.add(one)
    step(planner)
    step(planner)  # 5 + 4 + 3 tokens are in place, and all have drawn one more
    assert [row.sequence for row in step(planner)] == [first, later]
    assert (latest.place, latest.computed, latest.preempted) == (None, 0, True)
    assert planner.preempted_total == 1
    planner.leave(first)
    # Its prompt and what it had drawn, in chunks like any prompt.
    assert [row.tokens for row in step(planner) if row.sequence is latest] == [[0, 1, 2, 7]]
    assert latest.tokens == [0, 1, 2, 7, 7]


def test_whoever_made_room_waits_before_those_that_came_later() -> None:
    planner, _ = scheduler(places=3, room=8)
    early, late, last = sequence(3), sequence(3), sequence(6)
    planner.add(early)
    planner.add(late)
    step(planner)
    planner.add(last)
    step(planner)
    step(planner)
    assert (late.place, last.place) == (None, None)
    planner.leave(early)
    step(planner)
    assert late.place is not None
    assert last.place is None


def test_a_sequence_that_made_room_still_has_had_its_cached_prompt() -> None:
    planner, _ = scheduler(places=2, room=9)
    planner.add(sequence(4))
    asked = sequence(4, salt="3")
    planner.add(asked)
    for _ in range(3):
        step(planner)
    assert asked.preempted
    assert asked.cached == 3


def test_a_step_that_holds_nobody_up_may_be_larger() -> None:
    planner, _ = scheduler(quiet_budget=3 * BUDGET)
    planner.add(sequence(100))
    assert shape(step(planner)) == [(0, 3 * BUDGET)]
    planner.add(sequence(1))
    assert shape(step(planner)) == [(1, 1), (0, CHUNK)]


def test_deadlines_are_told_in_every_phase() -> None:
    planner, _ = scheduler(places=1)
    running, waiting, patient = (
        sequence(5, deadline=10.0),
        sequence(1, deadline=20.0),
        sequence(1),
    )
    for one in (running, waiting, patient):
        planner.add(one)
    step(planner)
    assert planner.late(9.9) == []
    assert planner.late(10.0) == [running]
    assert set(planner.late(30.0)) == {running, waiting}


def test_a_budget_below_a_chunk_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no room"):
        Scheduler(FakeSpace(1), max_waiting=1, chunk=8, budget=7)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, steps, endings and failures; everything is accounted for at all times."""

    # Room for the longest sequence alone: 30 tokens and one for every step.
    @initialize(places=st.integers(1, 4), room=st.integers(70, 200))
    def begin(self, places: int, room: int) -> None:
        self.planner, self.space = scheduler(places, max_waiting=5, room=room)
        self.alive: list[Sequence] = []
        self.rows: list[StepRow] | None = None
        self.turns: dict[Sequence, int] = {}

    @rule(
        length=st.integers(1, 30),
        priority=st.sampled_from(sorted(PRIORITIES)),
        cached=st.integers(0, 9),
    )
    def arrive(self, length: int, priority: str, cached: int) -> None:
        asked = sequence(length, priority, salt=str(cached))
        room = 5 + self.space.free - self.planner.waiting
        try:
            self.planner.add(asked)
        except OverloadedError:
            assert room <= 0
        else:
            assert room > 0
            self.alive.append(asked)

    @precondition(lambda self: self.rows is None)
    @rule()
    def plan(self) -> None:
        self.rows = self.planner.plan()
        assert bool(self.rows) == bool(self.planner.running)
        chunks = [row for row in self.rows if len(row.tokens) > 1]
        for row in self.rows:
            assert not row.sequence.left
            assert row.tokens == row.sequence.tokens[row.begin : row.begin + len(row.tokens)]
            assert row.tokens
        assert len({row.place for row in self.rows}) == len(self.rows)
        total = sum(len(row.tokens) for row in self.rows)
        assert sum(self.space.lengths.values()) <= self.space.room
        assert total <= max(BUDGET, len(self.rows) + CHUNK - 1) or len(chunks) <= 1

    @precondition(lambda self: self.rows)
    @rule(broken=st.booleans(), data=st.data())
    def compute(self, broken: bool, data: st.DataObject) -> None:
        rows = self.rows or []
        failed = data.draw(st.sets(st.sampled_from(range(len(rows))))) if broken else set()
        for index in failed:
            self.planner.leave(rows[index].sequence, keep=False)
            if rows[index].sequence in self.alive:
                self.alive.remove(rows[index].sequence)
        done = [row for index, row in enumerate(rows) if index not in failed]
        self.planner.computed(done)
        for row in done:
            if row.wants_logits and not row.sequence.left:
                self.planner.append(row.sequence, 99)
        self.rows = None

    @precondition(lambda self: self.rows == [])
    @rule()
    def nothing_to_compute(self) -> None:
        self.planner.computed([])
        self.rows = None

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), keep=st.booleans())
    def leave(self, data: st.DataObject, keep: bool) -> None:
        asked = data.draw(st.sampled_from(self.alive))
        self.alive.remove(asked)
        self.planner.leave(asked, keep=keep)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        in_step = {row.place for row in self.rows or []}
        held = {asked.place for asked in self.alive if asked.place is not None}
        assert held <= self.space.busy
        assert self.space.busy - held <= in_step
        assert self.planner.running == len(self.space.busy)
        assert self.planner.running + self.planner.waiting >= len(self.alive)
        for asked in self.alive:
            assert 0 <= asked.computed < len(asked.tokens) or asked.place in in_step

    def teardown(self) -> None:
        if self.rows is not None:
            self.planner.computed(self.rows)
        for _ in range(200):
            for row in step(self.planner):
                if row.wants_logits:
                    self.planner.leave(row.sequence)
        assert (self.planner.running, self.planner.waiting) == (0, 0)
        assert not self.space.busy


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
