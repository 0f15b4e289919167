"""The busier the device with others' work, the fewer sequences run."""

import pytest

from engine_core.ladder import DEFAULT_LADDER, Ladder


@pytest.mark.parametrize(
    ("use", "most"), [(0.0, 32), (0.59, 32), (0.6, 16), (0.79, 16), (0.8, 1), (1.0, 1)]
)
def test_default_is_all_then_half_then_one(use: float, most: int) -> None:
    assert DEFAULT_LADDER.most(use, 32) == most


def test_one_sequence_always_runs() -> None:
    assert Ladder(((0.9, 0.1),)).most(0.5, 4) == 1


def test_shares_are_rounded_down_to_whole_sequences() -> None:
    assert Ladder(((0.9, 0.29),)).most(0.5, 100) == 29
    assert Ladder(((0.9, 0.5),)).most(0.5, 9) == 4


def test_text_gives_the_rungs_and_they_give_the_text() -> None:
    assert Ladder.from_text("60%:100%,80%:50%") == DEFAULT_LADDER
    assert str(DEFAULT_LADDER) == "60%:100%, 80%:50%"
    assert Ladder.from_text("95%:100%") == Ladder(((0.95, 1.0),))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "60:100",
        "60%:100%,",
        "0%:100%",
        "60%:120%",
        "80%:50%,60%:100%",
        "60%:50%,80%:100%",
        "60%:100%,60%:50%",
    ],
)
def test_wrong_text_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match="such as 60%:100%, 80%:50%"):
        Ladder.from_text(text)
