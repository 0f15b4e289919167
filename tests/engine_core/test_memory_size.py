"""Limits on memory are told where they cannot be, with one that can."""

import pytest

from engine_core import memory_size
from engine_core.memory_size import MemorySize


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_size, "memory_limit", lambda: 3 * 2**30 + 5)


def test_a_size_keeps_what_was_written() -> None:
    size = MemorySize.from_text("1.5 GiB")
    assert (str(size), size.bytes) == ("1.5 GiB", 3 * 2**29)


@pytest.mark.parametrize(
    ("text", "least", "words"),
    [
        ("3GiB", 0, None),
        ("3072.1MiB", 0, "give at most 3072MiB"),
        ("1023KiB", 2**20, "give at least 1 MiB"),
        ("1MiB", 2**20, None),
    ],
)
def test_a_fault_comes_with_a_size_that_would_do(text: str, least: int, words: str | None) -> None:
    fault = MemorySize.from_text(text).fault(least=least)
    assert fault is None if words is None else words in str(fault)
