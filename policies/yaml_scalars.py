"""What a YAML scalar means, and whether that fits the type which is asked for.

Unquoted scalars mean what they mean in JSON: `12`, `0.5`, `true`, `null`. Everything else is text,
among it YAML 1.1's surprises `on`, `010` and `1:30`.
"""

import difflib
import math
import re
from collections.abc import Iterable
from typing import cast

from msgspec import inspect

from policies.yaml_tree import Node, Scalar, Sequence

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_MAX_DIGITS = 18  # fits a 64-bit integer
_SHOWN = 40  # characters of a wrong value that a message repeats

Value = str | bool | int | float | None


def resolve(node: Scalar) -> Value:
    """Return the value of a scalar."""
    text = node.text
    if not node.plain:
        return text
    if text in {"", "~", "null"}:
        return None
    if text in {"true", "false"}:
        return text == "true"
    if _INTEGER.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text)
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def describe(node: Node) -> str:
    """Return what a person sees there: `a list`, `text 'abc'`, `integer 12`."""
    if isinstance(node, Sequence):
        return "a list"
    if not isinstance(node, Scalar):
        return "a mapping"
    value = resolve(node)
    if value is None:
        return "nothing"
    shown = node.text if len(node.text) <= _SHOWN else node.text[:_SHOWN] + "…"
    if isinstance(value, str):
        return f"text '{' '.join(shown.split())}'"
    kind = {bool: "true/false", int: "integer", float: "number"}[type(value)]
    return f"{kind} {shown}"


def misfit(value: Value, info: inspect.Type) -> tuple[str, str] | None:
    """Return (what was expected, a hint or nothing) if `value` is not of the type `info`."""
    match info:
        case inspect.LiteralType():
            return _misfit_literal(value, info)
        case inspect.StrType():
            if not isinstance(value, str):
                return "text", "" if value is None else "; put it in quotes"
            return ("text", "") if len(value) < (info.min_length or 0) else None
        case inspect.BoolType():
            return None if isinstance(value, bool) else ("true or false", "")
        case inspect.IntType():
            fits = type(value) is int and _within(value, info)
            return None if fits else ("integer" + _bounds(info), "")
        case inspect.FloatType():
            fits = type(value) in {int, float} and _within(cast("float", value), info)
            return None if fits else ("number" + _bounds(info), "")
        case _:
            raise TypeError(f"the YAML reader has no rule for {info}")


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or nothing if no valid word is near; capitals do not matter."""
    names = {name.lower(): name for name in sorted(valid)}
    close = difflib.get_close_matches(word.lower(), names, n=1)
    return f"; did you mean '{names[close[0]]}'?" if close else ""


def _misfit_literal(value: Value, info: inspect.LiteralType) -> tuple[str, str] | None:
    if not isinstance(value, bool) and value in info.values:
        return None
    words = [str(choice) for choice in info.values]
    one_of = "one of " if len(words) > 1 else ""
    return one_of + ", ".join(words), did_you_mean(str(value), words)


def _within(value: float, info: inspect.IntType | inspect.FloatType) -> bool:
    return (info.ge is None or value >= info.ge) and (info.le is None or value <= info.le)


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    if info.ge is not None and info.le is not None:
        return f" from {info.ge} to {info.le}"
    return f" of at least {info.ge}" if info.ge is not None else ""
