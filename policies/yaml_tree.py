"""YAML text into a plain tree whose every node knows its line and column.

PyYAML scans and parses; nothing is constructed, so no tag can run code. Of YAML's graph features
nothing is taken: anchors, aliases, merge keys, tags, directives and second documents are problems.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from policies.errors import Problem

_UNUSABLE = re.compile(r"[\x00\ud800-\udfff]")
MAX_DEPTH = 32
"""Deeper than any file of ours; bounds the recursion over a hostile one."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """Text; `plain` when it stands without quotes and may mean a number or true/false."""

    line: int
    column: int
    text: str
    plain: bool


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    line: int
    column: int
    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` of a mapping; line and column are the key's."""

    line: int
    column: int
    value: "Node"


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys in the order of the file."""

    line: int
    column: int
    entries: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Broken:
    """Stands where a problem was already reported, so that it is reported once."""

    line: int
    column: int


Node = Scalar | Sequence | Mapping | Broken


def parse(text: str, source: str, problems: list[Problem]) -> Node:
    """Return the tree of the one document in `text`; an empty text is an empty mapping.

    Appends what is wrong to `problems` and goes on where it can.
    """
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        return _forbidden_character(error, text, source, problems)
    try:
        return _Composer(_events(loader), source, problems).document()
    except yaml.MarkedYAMLError as error:
        problems.append(_syntax_problem(error, text, source))
    except yaml.reader.ReaderError as error:
        return _forbidden_character(error, text, source, problems)
    except (ValueError, OverflowError):
        # PyYAML hands the number of an escape such as "\U7FFFFFFF" to chr() unchecked.
        message = "an escape that stands for no character"
        problems.append(Problem(source, loader.line + 1, loader.column + 1, message))
    finally:
        loader.dispose()
    return Broken(1, 1)


def _events(loader: yaml.SafeLoader) -> Iterator[Any]:
    while loader.check_event():
        yield loader.get_event()  # type: ignore[no-untyped-call]


def _forbidden_character(
    error: yaml.reader.ReaderError, text: str, source: str, problems: list[Problem]
) -> Broken:
    before = text[: error.position]
    line = before.count("\n") + 1
    column = error.position - before.rfind("\n")
    problems.append(Problem(source, line, column, "a control character that YAML forbids"))
    return Broken(1, 1)


class _TooDeepError(Exception):
    """The tree is deeper than `MAX_DEPTH`; already reported."""


class _Composer:
    def __init__(self, events: Iterator[Any], source: str, problems: list[Problem]) -> None:
        self._events = events
        self._source = source
        self._problems = problems

    def document(self) -> Node:
        next(self._events)  # StreamStart
        start = next(self._events)
        if isinstance(start, yaml.StreamEndEvent):
            return Mapping(1, 1, {})
        if start.version is not None or start.tags:
            self._report(start, "directives such as %YAML are not accepted; remove the line")
        try:
            root = self._node(next(self._events), 0)
        except _TooDeepError:
            return Broken(1, 1)
        next(self._events)  # DocumentEnd
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            self._report(after, "a second document starts here; keep one document in a file")
        return root

    def _report(self, event: Any, message: str) -> Broken:
        broken = Broken(event.start_mark.line + 1, event.start_mark.column + 1)
        self._problems.append(Problem(self._source, broken.line, broken.column, message))
        return broken

    def _node(self, event: Any, depth: int) -> Node:
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if depth > MAX_DEPTH:
            self._report(event, f"nested deeper than {MAX_DEPTH} levels")
            raise _TooDeepError
        if isinstance(event, yaml.AliasEvent):
            return self._report(event, f"alias *{event.anchor} is not accepted; repeat the value")
        if event.anchor is not None:
            self._report(event, f"anchor &{event.anchor} is not accepted; remove it")
        if isinstance(event, yaml.ScalarEvent):
            # Neither a path nor a command can hold it.
            if _UNUSABLE.search(event.value):
                return self._report(event, "an escape for NUL or for half a character")
            node: Node = Scalar(line, column, event.value, event.style is None)
        elif isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(child := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(child, depth + 1))
            node = Sequence(line, column, tuple(items))
        else:
            node = Mapping(line, column, self._entries(depth))
        if event.tag is not None:
            return self._report(event, f"tag {event.tag} is not accepted; remove it")
        return node

    def _entries(self, depth: int) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event, depth + 1)
            value = self._node(next(self._events), depth + 1)
            if isinstance(key, Broken):
                continue
            if not isinstance(key, Scalar):
                self._report(event, "a key must be a word, not a list or a mapping")
            elif key.plain and key.text == "<<":
                self._report(event, "merge key << is not accepted; repeat the values")
            elif first := entries.get(key.text):
                self._report(event, f"duplicate key '{key.text}', first on line {first.line}")
            else:
                entries[key.text] = Entry(key.line, key.column, value)
        return entries


_HINTS = (
    ("chomping or indentation", "put a value that starts with > or | in quotes"),
    ("mapping values are not allowed", "check the indentation here and on the line above"),
    ("block end", "check the indentation here and on the line above"),
    ("could not find expected ':'", "check the line above: a key needs a colon and a space"),
    ("unexpected end of stream", "a quote is not closed"),
    ("expected ',' or", "a bracket is not closed, or a comma is missing"),
    ("cannot start any token", "put the value in quotes"),
)
"""What PyYAML says, and what a person should do about it."""


def _syntax_problem(error: yaml.MarkedYAMLError, text: str, source: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    said = error.problem or error.context or "not valid YAML"
    lines = text.split("\n")
    row = lines[line - 1] if line <= len(lines) else ""
    if "\t" in row[: len(row) - len(row.lstrip())] or row[column - 1 : column] == "\t":
        return Problem(source, line, column, "a tab; indent with spaces")
    hint = next((f"; {todo}" for words, todo in _HINTS if words in said), "")
    return Problem(source, line, column, f"not valid YAML: {said}{hint}")
