"""Writes the tables of `docs/engines.md` from `engine_core.parameters`.

python -m engine_core.parameter_table docs/engines.md
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine_core.parameters import CHAT, COMPLETION, EXTRAS, Parameter

ENGINES = ("edge", "cloud")
BEGIN = (
    "<!-- What follows is written by `python -m engine_core.parameter_table docs/engines.md`. -->"
)
END = "<!-- What follows is written by hand. -->"

_FATES = {"supported": "yes", "refused": "400", "ignored": "ignored"}
_TABLES = (
    ("`POST /v1/chat/completions`", CHAT),
    ("`POST /v1/completions`", COMPLETION),
    ("Both, beyond OpenAI's", EXTRAS),
)


def write_tables() -> str:
    """Return the tables as Markdown."""
    return "\n".join(f"### {title}\n\n{_table(parameters)}" for title, parameters in _TABLES)


def fill(document: str) -> str:
    """Return a document with the tables between its two marks, in place of what was there.

    Raises:
        ValueError: it lacks the marks.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError("the document lacks the two marks between which the tables go")
    return f"{before}{BEGIN}\n\n{write_tables()}\n{END}{after}"


def _table(parameters: Iterable[Parameter]) -> str:
    rows = [
        ("parameter", *ENGINES, "notes"),
        ("---",) * (len(ENGINES) + 2),
        *(
            (f"`{each.name}`", *(_FATES[each.fate] for _ in ENGINES), each.note)
            for each in sorted(parameters, key=lambda each: each.name)
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine_core.parameter_table")
    parser.add_argument("document", type=Path, help="file whose tables are written anew")
    path: Path = parser.parse_args(arguments).document
    path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
