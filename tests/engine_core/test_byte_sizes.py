"""Sizes as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.byte_sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1KiB", 1024),
        ("768MiB", 768 * 2**20),
        ("512 MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "768", "MiB", "768MB", "768 mib", "-1MiB", "0MiB", "1e3MiB", "1  MiB", "٣MiB", "1MiB\n"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"768MiB or 1\.5GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (720 * 2**20, "720 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_a_size_is_shown_in_the_largest_unit_that_it_fills(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1024, 2**50))
def test_what_is_shown_can_be_parsed_and_is_close(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.05)
