"""How hard a request is for a small model: a pure, explainable score from 0 to 1.

A logistic function over a few counts: how long the text is, what it asks for, how much mathematics
or code it holds. The words are in `router.decide.lexicon`, English and Chinese alike; sizes are in
token-equivalents, so that one request is about as large in both languages. The weights are set by
hand: each says how many logits one step of its feature is worth.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from router.decide import lexicon
from router.decide.lexicon import CHINESE, ENGLISH, FUNCTION_WORDS, chinese_terms

HEAD_CHARS = 1500
TAIL_CHARS = 1000
"""Of a longer text only its first and last characters are read: tasks stand at its ends."""
DENSE_HEAD_CHARS = 600
DENSE_TAIL_CHARS = 400
"""The same for dense scripts such as Chinese: about as many token-equivalents."""
PER_LATIN_WORD = 1.3
PER_CJK_CHARACTER = 0.75
"""Token-equivalents; ratios of common tokenizers on parallel English and Chinese text."""
REASONS = 5

_DENSE = 1.5  # bytes of UTF-8 per character
_TOKEN = re.compile(r"c\+\+|c#|[a-zà-öø-ɏ]+|[0-9]+(?:[.,][0-9]+)*|[㐀-鿿]|[^\W_]")
_FULL_WIDTH = {0xFF01 + i: 0x21 + i for i in range(94)} | {0x3000: 0x20}
"""Full-width forms of ASCII, as Chinese input methods write them."""
_INVISIBLE = dict.fromkeys(
    (0xAD, 0xFEFF, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A))
)
"""Soft hyphens, zero-width and direction marks, which come along with copied text."""
_AS_SEEN: dict[int, int | None] = {**_FULL_WIDTH, **_INVISIBLE}
_ITEM = re.compile(r"(?:^|\s)[(]?(?:[0-9]{1,2}|[a-h])[.)、]\s")


class Complexity(msgspec.Struct, frozen=True):
    """The score, whether it can be trusted, and where it comes from.

    Args:
        score: From 0 (any model answers this) to 1 (a small model will fail).
        unknown: The text lies outside what the score knows; a low score then means nothing.
        reasons: The largest contributions in logits, the largest first.
    """

    score: float
    unknown: bool
    reasons: tuple[tuple[str, float], ...]


@dataclass(slots=True)
class _Counts:
    """What stands in a text. `hits` counts different words of a category, not occurrences."""

    latin: int = 0  # words
    cjk: int = 0  # characters
    other: int = 0  # characters of other scripts
    function: int = 0  # common English words among the Latin ones
    numbers: int = 0  # different ones
    seen: int = 0  # characters that belong to any of these
    hits: Counter[str] = field(default_factory=Counter)


_BASE = -2.4
_WEIGHTS = {
    "length": 0.7,
    "proof or derivation": 3.0,
    "engineering": 1.6,
    "analysis": 1.3,
    "writing": 0.9,
    "code": 1.2,
    "mathematics": 1.3,
    "formulas": 0.9,
    "code symbols": 0.5,
    "quantities": 0.7,
    "constraints": 0.6,
    "conditions": 0.5,
    "steps": 0.3,
    "greeting": -0.5,
    "everyday request": -0.8,
    "simple question": -0.9,
}
"""Logits per unit of a feature, set by hand; one word of a category is one unit, three are two."""
_CATEGORIES = {
    "proof or derivation": (lexicon.PROOF, 3),
    "engineering": (lexicon.ENGINEERING, 3),
    "analysis": (lexicon.ANALYSIS, 5),
    "writing": (lexicon.COMPOSING, 2),
    "code": (lexicon.CODE, 5),
    "mathematics": (lexicon.MATHEMATICS, 5),
    "constraints": (lexicon.CONSTRAINT, 3),
    "conditions": (lexicon.CONDITION, 3),
    "greeting": (lexicon.GREETING, 2),
    "everyday request": (lexicon.CHORE, 3),
}
"""Which words make a feature, and after how many of them more make no difference."""
_TASKS = (
    lexicon.PROOF,
    lexicon.ENGINEERING,
    lexicon.ANALYSIS,
    lexicon.COMPOSING,
    lexicon.CODE,
    lexicon.MATHEMATICS,
)
_FORMULA = "=+^\\<>≤≥×÷√∑∫π∈"  # noqa: RUF001 - the multiplication sign is meant
_CODE = "{};()[]_"
_USUAL_BRACKETS = 2  # prose has them too
_NOTATION = _FORMULA + _CODE + "$~-.,"
"""Symbols that formulas and code are full of."""

_SHORT = 12  # token-equivalents up to which length adds nothing
_QUESTION = 30  # token-equivalents up to which a question can be a simple one
_MAX_COUNT = 12  # of symbols and steps; more make no difference
_MAX_QUANTITIES = 5

_MOSTLY_SYMBOLS = 0.6  # share of the characters
_FOREIGN = 0.3  # share of the letters in other scripts
_PROSE_WORDS = 10  # as many Latin words must hold…
_FUNCTION_SHARE = 0.07  # …this share of common English words (English prose has about 0.4)


def estimate(text: str) -> Complexity:
    """Judge one ask. Takes well under a millisecond at any length."""
    text = _excerpt(text)
    counts = _count(text)
    features = _features(text, counts)
    parts = {name: _WEIGHTS[name] * value for name, value in features.items() if value}
    largest = sorted(parts.items(), key=lambda part: -abs(part[1]))[:REASONS]
    return Complexity(
        score=1 / (1 + math.exp(-_BASE - sum(parts.values()))),
        unknown=_is_unknown(text, counts),
        reasons=tuple((name, round(value, 2)) for name, value in largest),
    )


def _excerpt(text: str) -> str:
    text = _ends(text, HEAD_CHARS, TAIL_CHARS)
    if len(text.encode("utf-8", "surrogatepass")) > _DENSE * len(text):
        text = _ends(text, DENSE_HEAD_CHARS, DENSE_TAIL_CHARS)
    return (text if text.isascii() else text.translate(_AS_SEEN)).lower()


def _ends(text: str, head: int, tail: int) -> str:
    return text if len(text) <= head + tail else f"{text[:head]}\n{text[-tail:]}"


def _count(text: str) -> _Counts:
    counts = _Counts()
    for token, times in Counter(_TOKEN.findall(text)).items():
        counts.seen += len(token) * times
        first = token[0]
        if first.isdigit():
            counts.numbers += 1
        elif "㐀" <= first <= "鿿":
            counts.cjk += times
        elif first <= "ɏ":
            counts.latin += times
            if token in FUNCTION_WORDS:
                counts.function += times
            if category := ENGLISH.get(token):
                counts.hits[category] += 1
        else:
            counts.other += times
    if counts.cjk:
        counts.hits.update(CHINESE[term] for term in chinese_terms(text))
    return counts


def _features(text: str, counts: _Counts) -> dict[str, float]:
    hits = counts.hits
    size = counts.latin * PER_LATIN_WORD + counts.cjk * PER_CJK_CHARACTER + counts.numbers
    formulas = sum(map(text.count, _FORMULA))
    symbols = sum(map(text.count, _CODE)) - _USUAL_BRACKETS
    quantities = counts.numbers + hits[lexicon.NUMBER]
    simple = (
        hits[lexicon.LOOKUP] > 0
        and size < _QUESTION
        and formulas == 0
        and quantities < 2
        and not any(hits[task] for task in _TASKS)
    )
    features = {
        name: math.log2(1 + min(hits[category], most))
        for name, (category, most) in _CATEGORIES.items()
    }
    features["length"] = math.log2(max(size / _SHORT, 1))
    features["formulas"] = math.log1p(min(formulas, _MAX_COUNT))
    features["code symbols"] = math.log1p(min(max(symbols, 0), _MAX_COUNT))
    features["quantities"] = math.log2(1 + min(quantities, _MAX_QUANTITIES))
    features["steps"] = math.log2(1 + min(len(_ITEM.findall(text)), _MAX_COUNT))
    features["simple question"] = float(simple)
    return features


def _is_unknown(text: str, counts: _Counts) -> bool:
    letters = counts.latin + counts.cjk + counts.other
    visible = len(text) - sum(map(text.count, " \t\n"))
    symbols = visible - counts.seen - sum(map(text.count, _NOTATION))
    if letters + counts.numbers == 0 or symbols > _MOSTLY_SYMBOLS * visible:
        return True
    if counts.other > _FOREIGN * letters:
        return True
    prose = counts.latin >= _PROSE_WORDS and counts.latin > counts.cjk
    coded = counts.hits[lexicon.CODE] + counts.hits[lexicon.MATHEMATICS] > 0
    return prose and not coded and counts.function < _FUNCTION_SHARE * counts.latin
