"""Which slot a sequence gets, and what it finds there."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_engine.slots import SlotSpace


def place(space: SlotSpace, tokens: list[int], salt: str = "") -> tuple[int, int]:
    found = space.admit(tokens, salt)
    assert found is not None
    return found.place, found.cached


def leave(space: SlotSpace, tokens: list[int], salt: str = "") -> int:
    slot, _ = place(space, tokens, salt)
    space.release(slot, tokens, 0)
    return slot


def test_the_next_turn_begins_where_the_last_one_ended() -> None:
    space = SlotSpace(2)
    slot = leave(space, [1, 2, 3, 4])
    assert place(space, [1, 2, 3, 4, 5, 6]) == (slot, 4)


def test_drawn_tokens_stay_only_where_they_equal_those_of_a_prompt() -> None:
    for keeps, cached in ((True, 5), (False, 3)):
        space = SlotSpace(1, keeps_generated=keeps)
        place(space, [1, 2, 3])
        space.release(0, [1, 2, 3, 4, 5], 2)
        assert place(space, [1, 2, 3, 4, 5, 6]) == (0, cached)


def test_the_last_token_is_always_left_to_compute() -> None:
    space = SlotSpace(1)
    leave(space, [1, 2, 3])
    assert place(space, [1, 2, 3]) == (0, 2)


def test_another_salt_finds_nothing() -> None:
    space = SlotSpace(1)
    leave(space, [1, 2, 3], "one")
    assert place(space, [1, 2, 3, 4], "two") == (0, 0)


def test_the_longest_common_prefix_wins() -> None:
    space = SlotSpace(3)
    held = [place(space, tokens) for tokens in ([1, 2], [1, 2, 3, 4], [9])]
    for (slot, _), tokens in zip(held, ([1, 2], [1, 2, 3, 4], [9]), strict=True):
        space.release(slot, tokens, 0)
    assert place(space, [1, 2, 3, 4, 5]) == (1, 4)


def test_a_common_greeting_does_not_wipe_out_a_long_conversation() -> None:
    space = SlotSpace(2)
    greeting = [1] * 20
    conversation = [*greeting, *range(100, 1000)]
    slot = leave(space, conversation)
    assert place(space, [*greeting, 7, 8])[0] != slot
    assert place(space, [*conversation, 5]) == (slot, len(conversation))


def test_an_old_conversation_makes_room_before_a_fresh_one() -> None:
    space = SlotSpace(2)
    old, fresh = [1] * 50, [2] * 50
    held = [place(space, old)[0], place(space, fresh)[0]]
    space.release(held[0], old, 0)
    space.release(held[1], fresh, 0)
    assert place(space, [3] * 10)[0] == held[0]


def test_a_busy_slot_is_never_given_twice() -> None:
    space = SlotSpace(2)
    assert {place(space, [1])[0], place(space, [1])[0]} == {0, 1}
    assert space.admit([1], "") is None
    assert space.free == 0


def test_forgetting_drops_what_free_slots_keep() -> None:
    space = SlotSpace(3)
    busy = place(space, [5, 6])[0]
    kept = leave(space, [1, 2, 3])
    assert space.kept_tokens == 3
    assert space.forget() == [kept]
    assert (space.kept_tokens, space.forget()) == (0, [])
    space.release(busy, [5, 6], 0)
    assert place(space, [5, 6, 7]) == (busy, 2)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(st.tuples(tokens, st.sampled_from("ab"), st.booleans()), max_size=40))
def test_what_is_cached_is_what_the_slot_holds(
    requests: list[tuple[list[int], str, bool]],
) -> None:
    """Against a model of the memory itself: a slot holds what was last computed in it."""
    space = SlotSpace(3)
    memory: dict[int, tuple[str, list[int]]] = {}
    running: list[tuple[int, list[int]]] = []
    for wanted, salt, stays in requests:
        found = space.admit(wanted, salt)
        if found is None:
            assert len(running) == 3
            slot, done = running.pop(0)
            space.release(slot, done, 0)
            continue
        assert found.place not in {slot for slot, _ in running}
        assert found.cached < len(wanted)
        if found.cached:
            owner, held = memory[found.place]
            assert owner == salt
            assert held[: found.cached] == wanted[: found.cached]
        memory[found.place] = (salt, wanted)
        if stays:
            running.append((found.place, wanted))
        else:
            space.release(found.place, wanted, 0)
    assert space.free == 3 - len(running)


def test_tokens_may_be_any_integers() -> None:
    space = SlotSpace(1)
    large = [int(np.iinfo(np.int32).max), 0, 5]
    leave(space, large)
    assert place(space, [*large, 1]) == (0, 3)
