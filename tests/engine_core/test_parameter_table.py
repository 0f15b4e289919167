"""The reference in the documentation says what the engines do, for every parameter there is."""

import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import completion_create_params as chat

from engine_core.openai import ChatRequest, CompletionRequest
from engine_core.parameter_table import BEGIN, END, fill, main, write_tables
from engine_core.parameters import CHAT, COMPLETION, EXTRAS, Parameter

DOCUMENT = Path(__file__).parents[2] / "docs" / "engines.md"


@pytest.mark.parametrize(
    ("table", "client_type"),
    [
        (CHAT, chat.CompletionCreateParamsStreaming),
        (COMPLETION, completion.CompletionCreateParamsStreaming),
    ],
)
def test_every_parameter_of_openais_client_is_in_its_table(
    table: tuple[Parameter, ...], client_type: Any
) -> None:
    assert {each.name for each in table} == set(typing.get_type_hints(client_type))


@pytest.mark.parametrize(
    ("table", "request_type"), [(CHAT, ChatRequest), (COMPLETION, CompletionRequest)]
)
def test_every_field_that_is_parsed_is_in_a_table_once(
    table: tuple[Parameter, ...], request_type: type[msgspec.Struct]
) -> None:
    names = [each.name for each in (*table, *EXTRAS)]
    assert sorted(names) == sorted(request_type.__struct_fields__)


def test_the_document_has_the_tables_as_they_are() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    assert fill(document) == document, "run python -m engine_core.parameter_table docs/engines.md"


def test_only_what_is_between_the_marks_is_written(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before {BEGIN} old {END} after", encoding="utf-8")
    assert main([str(path)]) == 0
    written = path.read_text(encoding="utf-8")
    assert written == f"before {BEGIN}\n\n{write_tables()}\n{END} after"
    assert "| `temperature` | yes | yes |" in written
    assert "| `echo` | 400 | 400 |" in written
    assert "| `user` | ignored | ignored |" in written


def test_a_document_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="two marks"):
        fill(f"{END} {BEGIN}")
