"""Amounts of memory as people write and read them: 768MiB, 1.5 GiB."""

import re

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?([KMGT]iB)", re.ASCII)


def parse_bytes(text: str) -> int:
    """Return the bytes that a size such as `768MiB` or `1.5 GiB` means.

    Raises:
        ValueError: it is no such size, or none above zero; the message is what was expected.
    """
    match = _SIZE.fullmatch(text)
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not size:
        raise ValueError("a size with its unit, such as 768MiB or 1.5GiB")
    return size


def format_bytes(size: int) -> str:
    """Return a size with its unit and three digits that count: `720 MiB`, `1.5 GiB`."""
    name, unit = next((u for u in reversed(_UNITS.items()) if size >= u[1]), ("B", 1))
    value = size / unit
    number = f"{value:.0f}" if value >= 99.95 or unit == 1 else f"{value:.1f}".removesuffix(".0")
    return f"{number} {name}"
