"""Problems in a YAML file, each with the place where a person must look."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine_core.errors import TidegateError


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong in one file. Lines and columns count from 1."""

    source: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}: {self.message}"


class YamlProblems(TidegateError):  # noqa: N818 - a list of problems, not one error
    """Everything that is wrong in a file, in the order of its lines; one line of text each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(map(str, self.problems)))
