"""A typed reader of YAML: msgspec structs out, every problem with its line and column.

The type says what a value may be and how large; see `policies.yaml_scalars` for the scalars.
"""

from collections.abc import Callable, Iterable
from collections.abc import Mapping as Map
from typing import Any, ClassVar, TypeVar, cast

from msgspec import inspect

from policies.errors import Problem, YamlProblems
from policies.yaml_scalars import describe, did_you_mean, misfit, resolve
from policies.yaml_tree import Broken, Mapping, Node, Scalar, Sequence, parse

T = TypeVar("T")


class Spot:
    """The place of a struct in its file, for checks that look at several keys together."""

    def __init__(self, node: Mapping, source: str, problems: list[Problem]) -> None:
        self._node = node
        self._source = source
        self._problems = problems

    def has(self, key: str) -> bool:
        """Return whether the key is written in the file (and not left to its default)."""
        return key in self._node.entries

    def problem(self, message: str, *path: str | int) -> None:
        """Report a problem at the last key or item of `path` that the file has."""
        node: Node = self._node
        line, column = node.line, node.column
        for step in path:
            if isinstance(node, Mapping) and isinstance(step, str) and step in node.entries:
                entry = node.entries[step]
                line, column, node = entry.line, entry.column, entry.value
            elif isinstance(node, Sequence) and isinstance(step, int) and step < len(node.items):
                node = node.items[step]
                line, column = node.line, node.column
            else:
                break
        self._problems.append(Problem(self._source, line, column, message))


Checks = Map[type, Callable[[Any, Spot], None]]


def load(
    text: str,
    type: type[T],  # noqa: A002 - msgspec's own name for it
    source: str,
    *,
    checks: Checks | None = None,
    unknown_hints: Map[str, str] | None = None,
) -> T:
    """Read one YAML document into a msgspec struct.

    Args:
        text: The document. Empty means an empty mapping.
        type: Struct whose fields may be scalars, `Literal`, `tuple[X, ...]`, `dict[str, X]`,
            other structs, any one of these or None, and classes whose `from_text(text)` returns a value
            or raises `ValueError` with what it expected.
        source: What messages call the file.
        checks: Per struct type, a function that looks at a struct read without a problem.
        unknown_hints: What to say about an unknown key instead of naming the nearest valid one.

    Raises:
        YamlProblems: everything that is wrong, at once.
    """
    problems: list[Problem] = []
    root = parse(text, source, problems)
    reader = _Reader(source, problems, checks or {}, unknown_hints or {})
    value = reader.read(root, inspect.type_info(type))
    if problems:
        raise YamlProblems(problems)
    return value  # type: ignore[no-any-return]


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or else what there is to choose from."""
    names = sorted(valid)
    return did_you_mean(word, names) or f"; valid: {', '.join(names)}"


class _MisfitError(Exception):
    """A node that does not fit its type; the problem is reported already."""


class _Reader:
    def __init__(
        self, source: str, problems: list[Problem], checks: Checks, hints: Map[str, str]
    ) -> None:
        self._source = source
        self._problems = problems
        self._checks = checks
        self._hints = hints
        self._misfits = 0

    def read(self, node: Node, info: inspect.Type) -> Any:
        """Return the value, or None after reporting why there is none."""
        read: Callable[..., Any] = self._readers.get(type(info), _Reader._scalar)
        try:
            if not isinstance(node, Broken):
                return read(self, node, info)
        except _MisfitError:
            pass
        self._misfits += 1
        return None

    def _report(self, node: Node, message: str) -> _MisfitError:
        self._problems.append(Problem(self._source, node.line, node.column, message))
        return _MisfitError()

    def _unfit(self, node: Node, expected: str, hint: str = "") -> _MisfitError:
        return self._report(node, f"expected {expected}, got {describe(node)}{hint}")

    def _optional(self, node: Node, info: inspect.UnionType) -> Any:
        if info.includes_none and isinstance(node, Scalar) and resolve(node) is None:
            return None
        (inner,) = (t for t in info.types if not isinstance(t, inspect.NoneType))
        return self.read(node, inner)

    def _struct(self, node: Node, info: inspect.StructType) -> Any:
        if not isinstance(node, Mapping):
            raise self._unfit(node, "a mapping (key: value lines)")
        misfits = self._misfits
        fields = {field.name: field for field in info.fields}
        values = {}
        for key, entry in node.entries.items():
            if key in fields:
                values[key] = self.read(entry.value, fields[key].type)
            else:
                hint = f"; {self._hints[key]}" if key in self._hints else nearest(key, fields)
                problem = Problem(
                    self._source, entry.line, entry.column, f"unknown key '{key}'{hint}"
                )
                self._problems.append(problem)
                self._misfits += 1
        missing = [f.name for f in info.fields if f.required and f.name not in node.entries]
        for name in missing:
            self._report(node, f"missing key '{name}'")
        if missing or self._misfits > misfits:
            raise _MisfitError
        value = info.cls(**values)
        if check := self._checks.get(info.cls):
            check(value, Spot(node, self._source, self._problems))
        return value

    def _dict(self, node: Node, info: inspect.DictType) -> dict[str, Any]:
        if not isinstance(node, Mapping):
            raise self._unfit(node, "a mapping (name: value lines)")
        if len(node.entries) < (info.min_length or 0):
            raise self._report(node, f"expected at least {info.min_length} entry, got none")
        return {key: self.read(e.value, info.value_type) for key, e in node.entries.items()}

    def _tuple(self, node: Node, info: inspect.VarTupleType) -> tuple[Any, ...]:
        if not isinstance(node, Sequence):
            raise self._unfit(node, "a list ([a, b], or lines that start with -)")
        if len(node.items) < (info.min_length or 0):
            raise self._report(node, f"expected at least {info.min_length} item, got none")
        return tuple(self.read(item, info.item_type) for item in node.items)

    def _custom(self, node: Node, info: inspect.CustomType | inspect.DataclassType) -> Any:
        if not isinstance(node, Scalar):
            raise self._unfit(node, "text")
        try:
            return cast("Any", info.cls).from_text(node.text)
        except ValueError as error:
            raise self._unfit(node, str(error)) from None

    def _scalar(self, node: Node, info: inspect.Type) -> Any:
        value = resolve(node) if isinstance(node, Scalar) else None
        if wrong := misfit(value, info):
            raise self._unfit(node, *wrong)
        return float(value) if isinstance(info, inspect.FloatType) and value is not None else value

    _readers: ClassVar[dict[type[inspect.Type], Callable[..., Any]]] = {
        inspect.UnionType: _optional,
        inspect.StructType: _struct,
        inspect.DictType: _dict,
        inspect.VarTupleType: _tuple,
        inspect.CustomType: _custom,
        inspect.DataclassType: _custom,
    }
