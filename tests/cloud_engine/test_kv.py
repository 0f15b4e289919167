"""Which blocks a sequence gets, what it finds in them, and that none is lost or given twice."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cloud_engine.kv import BlockSpace

SIZE = 4


def space_of(blocks: int, rows: int = 4, columns: int = 4) -> tuple[BlockSpace, np.ndarray]:
    """Return a space with so many blocks besides the trash block, and its table."""
    table = np.full((rows + 1, columns), 99, np.int32)
    return BlockSpace(blocks + 1, SIZE, rows, table), table


def place(space: BlockSpace, tokens: list[int], salt: str = "") -> tuple[int, int]:
    found = space.admit(tokens, salt)
    assert found is not None
    return found.place, found.cached


def leave(space: BlockSpace, tokens: list[int], salt: str = "") -> int:
    """Compute a sequence and let it go; return how much of it was there already."""
    row, cached = place(space, tokens, salt)
    space.written(row, tokens, len(tokens))
    space.release(row, tokens, 0)
    return cached


def test_a_sequence_gets_blocks_for_its_tokens_and_one_more() -> None:
    space, table = space_of(8)
    for tokens, blocks in ((3, 1), (4, 2), (7, 2), (16, 4)):
        row, _ = place(space, list(range(tokens)))
        assert np.count_nonzero(table[row]) == space.used_blocks == blocks
        space.release(row, [], 0)
        assert not table[row].any()


def test_the_next_turn_takes_over_the_full_blocks() -> None:
    space, table = space_of(8)
    row, _ = place(space, list(range(10)))
    first = table[row, :2].tolist()
    space.written(row, list(range(10)), 10)
    space.release(row, list(range(10)), 0)
    row, cached = place(space, [*range(10), 50, 51])
    assert (cached, table[row, :2].tolist()) == (8, first)


def test_the_last_token_is_always_left_to_compute() -> None:
    space, _ = space_of(8)
    leave(space, list(range(8)))
    assert place(space, list(range(8)))[1] == 4


def test_blocks_are_shared_with_a_sequence_that_still_runs() -> None:
    space, table = space_of(8)
    first, _ = place(space, list(range(9)))
    space.written(first, list(range(9)), 9)
    second, cached = place(space, list(range(9)))
    assert cached == 8
    assert table[first, :2].tolist() == table[second, :2].tolist()
    assert table[first, 2] != table[second, 2]
    assert space.used_blocks == 4
    space.release(first, list(range(9)), 0)
    assert space.used_blocks == 3


def test_only_what_is_written_is_found() -> None:
    space, _ = space_of(8)
    row, _ = place(space, list(range(12)))
    space.written(row, list(range(12)), 7)
    assert place(space, list(range(12)))[1] == 4


def test_another_salt_finds_nothing_and_hides_nothing() -> None:
    space, _ = space_of(8)
    leave(space, list(range(9)), "one")
    assert leave(space, list(range(9)), "two") == 0
    assert leave(space, list(range(9)), "one") == 8


def test_a_salt_cannot_lead_into_the_middle_of_a_chain() -> None:
    """Whoever knows another's salt and tokens knows what goes into the digest of a block."""
    space, _ = space_of(8)
    parent, tokens = b"p" * 32, [0x61616161] * SIZE
    spelled = parent + np.asarray(tokens, np.int32).tobytes()
    assert space._find([], spelled.decode()).digest not in space._chain(parent, tokens, 0, SIZE)


def test_a_block_depends_on_all_tokens_before_it() -> None:
    space, _ = space_of(8)
    leave(space, list(range(9)))
    assert place(space, [9, 9, 9, 9, 4, 5, 6, 7, 8])[1] == 0


def test_what_a_failed_sequence_wrote_or_took_over_is_not_found() -> None:
    space, _ = space_of(8)
    leave(space, list(range(5)))
    row, cached = place(space, list(range(9)))
    assert cached == 4
    space.written(row, list(range(9)), 9)
    space.release(row, [], 0)
    assert space.cached_blocks == 0
    assert place(space, list(range(9)))[1] == 0


def test_the_blocks_left_longest_ago_make_room_first_and_ends_before_beginnings() -> None:
    space, _ = space_of(5)
    leave(space, [1] * 8)
    leave(space, [2] * 8)
    assert (space.cached_blocks, space.free_blocks, space.evicted_total) == (4, 5, 0)
    leave(space, [3] * 4)  # takes the plain block and the end of the oldest
    assert space.evicted_total == 1
    assert leave(space, [1] * 9) == 4
    assert space.evicted_total == 2  # the oldest is now the end of the others
    assert leave(space, [2] * 9) == 4


def test_the_blocks_that_are_taken_over_are_not_evicted_for_the_rest() -> None:
    space, table = space_of(4)
    leave(space, [1] * 12)
    row, cached = place(space, [1] * 8 + [2] * 8)
    assert cached == 8
    assert len(set(table[row].tolist())) == 4
    assert space.evicted_total == 1


def test_what_was_evicted_is_not_found() -> None:
    space, _ = space_of(4)
    leave(space, [1] * 13)
    row, _ = place(space, [2] * 5)  # the plain block and the end of the others
    assert space.evicted_total == 1
    space.release(row, [], 0)
    assert leave(space, [1] * 13) == 8


def test_taking_over_blocks_that_nobody_holds_takes_free_ones() -> None:
    space, _ = space_of(5)
    leave(space, [1] * 13)
    first, _ = place(space, [2])
    assert space.free_blocks == 4
    assert space.admit([1] * 13, "") is None
    assert space.cached_blocks == 3
    assert space.grow(first, 8)


def test_growing_takes_blocks_when_they_are_needed() -> None:
    space, table = space_of(3, columns=3)
    row, _ = place(space, [1, 2, 3])
    space.changed()
    assert space.grow(row, 4)
    assert space.changed() == []
    assert space.grow(row, 5)
    assert space.changed() == [row]
    assert np.count_nonzero(table[row]) == 2


def test_growing_without_room_changes_nothing() -> None:
    space, table = space_of(3, columns=3)
    first, second = place(space, [1])[0], place(space, [2])[0]
    assert space.grow(second, 5)
    space.changed()
    before = table.copy()
    assert not space.grow(first, 5)
    assert np.array_equal(table, before)
    assert (space.changed(), space.free_blocks) == ([], 0)


def test_whoever_runs_can_grow_after_a_sequence_is_admitted() -> None:
    space, _ = space_of(4)
    first, _ = place(space, [1])
    assert space.admit([2] * 8, "") is None
    second, _ = place(space, [2] * 4)
    assert space.admit([3], "") is None
    assert space.free == 0
    assert space.grow(first, 5)
    assert not space.grow(second, 9)


def test_the_longest_sequence_fits_when_it_is_alone() -> None:
    space, _ = space_of(4)
    row, _ = place(space, [1] * 16)
    assert space.grow(row, 16)
    assert space.free == space.free_blocks == 0


def test_a_lower_limit_admits_nobody_until_enough_have_left() -> None:
    space, _ = space_of(20)
    first, second = place(space, [1])[0], place(space, [2])[0]
    space.limit = 1
    assert (space.free, space.admit([3], "")) == (0, None)
    space.release(first, [], 0)
    assert space.admit([3], "") is None
    space.release(second, [], 0)
    assert space.free == 1
    place(space, [3])
    assert space.admit([4], "") is None


def test_who_waits_is_looked_up_again_only_when_somebody_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space, _ = space_of(5)
    row, _ = place(space, [1] * 9)
    find, waiting, looked_up = space._find, [2] * 13, []

    def note(tokens: list[int], salt: str) -> object:
        looked_up.append(tokens)
        return find(tokens, salt)

    monkeypatch.setattr(space, "_find", note)
    assert [space.admit(waiting, "") for _ in range(3)] == [None, None, None]
    assert looked_up == [waiting]
    space.release(row, [], 0)
    assert space.admit(waiting, "") is not None


def test_forgetting_drops_what_nobody_holds() -> None:
    space, table = space_of(8)
    row, _ = place(space, [1] * 9)
    kept = table[row, :2].tolist()
    space.written(row, [1] * 9, 9)
    space.release(row, [1] * 9, 0)
    held, _ = place(space, [2] * 9)
    space.written(held, [2] * 9, 9)
    assert (sorted(space.forget()), space.forget()) == (sorted(kept), [])
    assert (space.cached_blocks, space.free_blocks, space.evicted_total) == (0, 5, 0)
    assert leave(space, [1] * 9) == 0
    assert place(space, [2] * 9)[1] == 8


def test_a_sequence_that_leaves_while_blocks_are_forgotten_loses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space, _ = space_of(8)
    leave(space, [1] * 9)
    row, _ = place(space, [2] * 9)
    space.written(row, [2] * 9, 9)
    unlearn, leaving = space._unlearn, [row]

    def unlearn_and_leave(block: int) -> None:
        unlearn(block)
        while leaving:
            space.release(leaving.pop(), [2] * 9, 0)

    monkeypatch.setattr(space, "_unlearn", unlearn_and_leave)
    assert len(space.forget()) == 4
    assert (space.free_blocks, space.used_blocks) == (8, 0)
    assert leave(space, [2] * 9) == 0


def test_rows_are_reported_once_and_all_of_them_at_first() -> None:
    space, table = space_of(8, rows=2)
    assert not table.any()
    assert (space.changed(), space.changed()) == ([0, 1, 2], [])
    row, _ = place(space, [1])
    space.release(row, [], 0)
    assert space.changed() == [row]


def test_fewer_blocks_than_the_longest_sequence_needs_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="3 blocks are less than a sequence of 4"):
        space_of(3)


@dataclass(eq=False)
class FakeBlock:
    """A block of the plain model: what it can be found by, and how many sequences hold it."""

    key: tuple[str, ...] | None = None
    users: int = 0


@dataclass
class FakeSequence:
    tokens: list[int]
    salt: str
    blocks: list[FakeBlock]
    computed: int
    place: int = field(default=-1)

    def key(self, blocks: int) -> tuple[str, ...]:
        """Return what its block number `blocks` - 1 is found by: all that leads there."""
        return (self.salt, *map(str, self.tokens[: blocks * SIZE]))


class BlockMachine(RuleBasedStateMachine):
    """Against a model that looks blocks up by the tokens themselves, in lists, one by one.

    A second witness is the memory: every written token is noted at its place in it, with all the
    tokens before it, and must be there as long as somebody relies on it.
    """

    @initialize(blocks=st.integers(5, 12), rows=st.integers(2, 4))
    def begin(self, blocks: int, rows: int) -> None:
        self.columns = 5
        self.space, self.table = space_of(blocks, rows, self.columns)
        self.blocks, self.rows, self.limit = blocks, rows, rows
        self.running: list[FakeSequence] = []
        self.idle: list[FakeBlock] = []
        self.evicted = 0
        self.memory: dict[tuple[int, int], tuple[str, ...]] = {}
        self.device_table = np.full_like(self.table, 99)

    @property
    def in_use(self) -> set[FakeBlock]:
        return {block for sequence in self.running for block in sequence.blocks}

    @property
    def free(self) -> int:
        return self.blocks - len(self.in_use)

    def find(self, key: tuple[str, ...]) -> FakeBlock | None:
        return next((b for b in [*self.in_use, *self.idle] if b.key == key), None)

    def take(self, sequence: FakeSequence, count: int) -> None:
        for _ in range(count):
            if self.free == len(self.idle):
                self.idle.pop(0)
                self.evicted += 1
            sequence.blocks.append(FakeBlock(users=1))

    # Few tokens and salts, so that much begins alike.
    @rule(
        stem=st.sampled_from([[0] * 20, [0] * 9 + [1] * 11, [1] * 20]),
        length=st.sampled_from(range(1, 21)),
        salt=st.sampled_from("ab"),
        chunk=st.sampled_from([0, 20, 20]),
    )
    def admit(self, stem: list[int], length: int, salt: str, chunk: int) -> None:
        sequence = FakeSequence(stem[:length], salt, [], 0)
        while (len(sequence.blocks) + 1) * SIZE < length:
            found = self.find(sequence.key(len(sequence.blocks) + 1))
            if found is None:
                break
            sequence.blocks.append(found)
        idle = [block for block in sequence.blocks if not block.users]
        fresh = min(length // SIZE + 1, self.columns) - len(sequence.blocks)
        fits = self.free - len(idle) - fresh >= len(self.running)
        placement = self.space.admit(sequence.tokens, salt)
        assert (placement is not None) == (fits and len(self.running) < self.limit)
        if placement is None:
            return
        for block in sequence.blocks:
            block.users += 1
            if block in self.idle:
                self.idle.remove(block)
        assert placement.place not in {other.place for other in self.running}
        assert 0 <= placement.place < self.rows
        sequence.place = placement.place
        sequence.computed = len(sequence.blocks) * SIZE
        assert placement.cached == sequence.computed < length
        self.running.append(sequence)
        self.take(sequence, fresh)
        self.compute(sequence, chunk)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.integers(1, 12))
    def step(self, data: st.DataObject, chunk: int) -> None:
        self.compute(data.draw(st.sampled_from(self.running)), chunk)

    def compute(self, sequence: FakeSequence, count: int) -> None:
        """Compute a chunk; a sequence that is at its end then draws a token, if it can grow."""
        begin = sequence.computed
        end = sequence.computed = min(begin + count, len(sequence.tokens))
        for at in range(begin, end):
            block = int(self.table[sequence.place, at // SIZE])
            self.memory[block, at % SIZE] = (sequence.salt, *map(str, sequence.tokens[: at + 1]))
        self.space.written(sequence.place, sequence.tokens, end)
        for full in range(begin // SIZE + 1, end // SIZE + 1):
            if self.find(sequence.key(full)) is None:
                sequence.blocks[full - 1].key = sequence.key(full)
        if end == len(sequence.tokens) < self.columns * SIZE:
            needed = -(-(end + 1) // SIZE) - len(sequence.blocks)
            grown = needed <= self.free
            assert self.space.grow(sequence.place, end + 1) == grown
            if grown:
                self.take(sequence, max(0, needed))
                sequence.tokens.append(count % 2)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.sampled_from([False, False, False, True]))
    def leave(self, data: st.DataObject, failed: bool) -> None:
        self.release(data.draw(st.sampled_from(self.running)), failed)

    @precondition(lambda self: len(self.running) > 1)
    @rule()
    def all_leave(self) -> None:
        for sequence in list(self.running):
            self.release(sequence, failed=False)

    def release(self, sequence: FakeSequence, failed: bool) -> None:
        kept = [] if failed else sequence.tokens[: sequence.computed]
        self.space.release(sequence.place, kept, 0)
        self.running.remove(sequence)
        for index, block in reversed(list(enumerate(sequence.blocks))):
            block.users -= 1
            if (index + 1) * SIZE > len(kept):
                block.key = None
            if block.key and not block.users:
                self.idle.append(block)

    @precondition(lambda self: len(self.idle) > 3)
    @rule()
    def forget(self) -> None:
        idle = list(self.space._idle)
        assert self.space.forget() == idle
        assert len(idle) == len(self.idle)
        self.idle.clear()

    @rule(limit=st.sampled_from([4, 4, 4, 2, 1, 0]))
    def set_limit(self, limit: int) -> None:
        self.space.limit = self.limit = min(limit, self.rows)

    @invariant()
    def the_device_has_the_rows_that_changed(self) -> None:
        for row in self.space.changed():
            self.device_table[row] = self.table[row]
        assert np.array_equal(self.device_table, self.table)

    @invariant()
    def the_numbers_are_those_of_the_model(self) -> None:
        assert self.space.free_blocks == self.free
        assert self.space.used_blocks == len(self.in_use)
        assert self.space.cached_blocks == len(self.idle)
        assert self.space.evicted_total == self.evicted
        room, places = self.free, len(self.running)
        while places < self.limit and room - 1 >= places:
            room, places = room - 1, places + 1
        assert self.space.free == places - len(self.running)

    @invariant()
    def every_block_is_in_one_state_and_counted_once_for_each_use(self) -> None:
        space = self.space
        uses: Counter[int] = Counter()
        for sequence in self.running:
            row = self.table[sequence.place].tolist()
            held = row[: len(sequence.blocks)]
            assert 0 not in held
            assert len(set(held)) == len(held)
            assert not any(row[len(held) :])
            uses.update(held)
        assert not self.table[self.rows].any()
        assert [uses[block] for block in range(self.blocks + 1)] == space._uses
        everywhere = [*uses, *space._plain, *space._idle]
        assert sorted(everywhere) == list(range(1, self.blocks + 1))
        assert set(space._idle) <= set(space._digests)
        assert not set(space._plain) & set(space._digests)
        assert {digest: block for block, digest in space._digests.items()} == space._known

    @invariant()
    def what_is_computed_is_still_in_memory(self) -> None:
        for sequence in self.running:
            for at in range(sequence.computed):
                block = int(self.table[sequence.place, at // SIZE])
                tokens = (sequence.salt, *map(str, sequence.tokens[: at + 1]))
                assert self.memory[block, at % SIZE] == tokens

    def teardown(self) -> None:
        for sequence in self.running:
            self.space.release(sequence.place, [], 0)
        self.space.forget()
        assert self.space.free_blocks == self.blocks


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
