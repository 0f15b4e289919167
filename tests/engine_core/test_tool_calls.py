"""Calls in a model's text are found however it is cut, and nothing else is taken for one."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine_core.tool_calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    ToolCall,
    ToolFormat,
    ToolSplitter,
    read_calls,
)

TOOLS = ("weather", "now")
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
CALL = ToolCall("weather", '{"city": "Paris"}')
NOW = ToolCall("now", "{}")


def split(
    pieces: Sequence[str], form: ToolFormat = HERMES, *, parallel: bool = True
) -> tuple[str, list[ToolCall]]:
    """Return all text and all calls of an answer that comes in these pieces."""
    splitter = ToolSplitter(form, TOOLS, parallel=parallel)
    out = [each for piece in pieces for each in splitter.push(piece)] + splitter.flush()
    return (
        "".join(each for each in out if isinstance(each, str)),
        [each for each in out if isinstance(each, ToolCall)],
    )


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello there.\n", "Hello there.\n", []),
        (f"<tool_call>\n{PARIS}\n</tool_call>", "", [CALL]),
        (f"Let me see.\n\n<tool_call>{PARIS}</tool_call>\n", "Let me see.", [CALL]),
        (f"<tool_call>{PARIS}</tool_call>\n Done. \n", "Done. \n", [CALL]),
        (
            r'<tool_call>{"name": "now", "arguments": {"at": "\"</tool_call>\\"}}</tool_call>!',
            "!",
            [ToolCall("now", r'{"at": "\"</tool_call>\\"}')],
        ),
        (
            f'<tool_call>{{"name": "now}}\n</tool_call><tool_call>{PARIS}</tool_call>',
            '<tool_call>{"name": "now}\n</tool_call>',
            [CALL],
        ),
        (
            f'<tool_call>{PARIS}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>',
            "",
            [CALL, NOW],
        ),
        (
            f'<tool_call>[{PARIS}, {{"name": "now", "arguments": {{}}}}]</tool_call>',
            "",
            [CALL, NOW],
        ),
        (f"<tool_call>{PARIS}", "", [CALL]),  # models forget the end
        (
            f"Write <tool_call> then. <tool_call>{PARIS}</tool_call>",
            "Write <tool_call> then.",
            [CALL],
        ),
        (
            f"<tool_call>oops</tool_call> <tool_call>{PARIS}</tool_call>",
            "<tool_call>oops</tool_call>",
            [CALL],
        ),
        ("1 < 2 <tool", "1 < 2 <tool", []),
        ("<tool_call>", "<tool_call>", []),
        ("</tool_call> stray", "</tool_call> stray", []),
    ],
)
def test_calls_between_tags_are_taken_out_of_the_text(
    text: str, content: str, calls: list[ToolCall]
) -> None:
    assert split([text]) == (content, calls)
    assert split(list(text)) == (content, calls)


@pytest.mark.parametrize(
    "json_text",
    [
        "",
        "weather",
        '{"name": "weather", "arguments": {"city": "Par',
        '{"name": "weather", "arguments": {city: 1}}',
        '{"name": "weather", "arguments": "Paris"}',
        '{"name": "weather", "arguments": ["Paris"]}',
        '{"name": "weather", "arguments": null}',
        '{"name": "rm -rf", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"arguments": {}}',
        "[]",
        '[{"name": "weather", "arguments": {}}, {"name": "unknown"}]',
        PARIS + " and more",
        "[" * 100_000,
        '{"name": "now", "arguments": ' + '{"a":' * 50_000,
    ],
)
def test_what_is_no_valid_call_of_an_offered_tool_stays_text(json_text: str) -> None:
    assert read_calls(json_text, TOOLS) == []
    text = f"<tool_call>{json_text}</tool_call>"
    assert split([text]) == (text, [])


def test_arguments_stay_as_the_model_wrote_them() -> None:
    arguments = '{"a":1.0,  "b": 12345678901234567890123, "c": "é\\n"}'
    (call,) = read_calls(f'{{"name": "now", "arguments": {arguments}}}', TOOLS)
    assert call.arguments == arguments


def test_no_half_of_a_tag_is_given_out() -> None:
    splitter = ToolSplitter(HERMES, TOOLS, parallel=True)
    assert splitter.push("Hi <tool_ca") == ["Hi"]
    assert splitter.push("ke>") == [" <tool_cake>"]
    assert splitter.push(" <tool_call>" + PARIS[:20]) == []
    assert splitter.push(PARIS[20:]) == []
    assert splitter.push("</tool_call>") == [CALL]


def test_without_parallel_calls_only_the_first_one_counts() -> None:
    two = f"A<tool_call>{PARIS}</tool_call><tool_call>{PARIS}</tool_call>B"
    assert split([two], parallel=False) == ("AB", [CALL])
    assert split([f"<tool_call>[{PARIS},{PARIS}]</tool_call>"], parallel=False) == ("", [CALL])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"[TOOL_CALLS] [{PARIS}]", "", [CALL]),
        (f"[TOOL_CALLS][{PARIS}, {PARIS}]", "", [CALL, CALL]),
        (f"I look. [TOOL_CALLS] [{PARIS}]", "I look.", [CALL]),
        ("[TOOL_CALLS] [oops", "[TOOL_CALLS] [oops", []),
        ("[1] is no mark", "[1] is no mark", []),
    ],
)
def test_mistrals_calls_follow_a_mark(text: str, content: str, calls: list[ToolCall]) -> None:
    assert split([text], MISTRAL) == (content, calls)
    assert split(list(text), MISTRAL) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [CALL]),
        ('\n {"name": "now", "parameters": {}} \n', "", [NOW]),
        (' {"name": "Bob", "parameters": {}}', ' {"name": "Bob", "parameters": {}}', []),
        ('Use {"name": "now"}', 'Use {"name": "now"}', []),
        (" \n", " \n", []),
    ],
)
def test_llamas_call_is_the_whole_answer(text: str, content: str, calls: list[ToolCall]) -> None:
    assert split([text], LLAMA) == (content, calls)
    assert split(list(text), LLAMA) == (content, calls)


PARTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            " ",
            "\n",
            "<",
            "é",
            "word",
            "{",
            "}",
            "[",
        ),
        *('"', "\\", '{"a": "', '{"name": "now", "arguments": {"a": "'),
        *(PARIS, f"[{PARIS}]", '{"name": "now"}', f"<tool_call>{PARIS}</tool_call>"),
    ]
)


@given(
    st.lists(PARTS, max_size=8).map("".join),
    st.lists(st.integers(0, 200), max_size=30),
    st.sampled_from([HERMES, MISTRAL, LLAMA]),
    st.booleans(),
)
@example(f"<tool_call><tool_call>{PARIS}</tool_call>", [11, 12], HERMES, False)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, places: list[int], form: ToolFormat, parallel: bool
) -> None:
    whole = split([text], form, parallel=parallel)
    assert split(cut(text, places), form, parallel=parallel) == whole
    assert split(list(text), form, parallel=parallel) == whole
    if not whole[1]:
        assert whole[0] == text


arguments = st.dictionaries(
    st.text(max_size=5),
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=9)
    | st.sampled_from([HERMES.opening, f'"{HERMES.closing}\\'])
    | st.lists(st.integers()),
    max_size=3,
)


@given(
    st.lists(st.tuples(st.sampled_from(TOOLS), arguments), max_size=3),
    st.text(alphabet="ab <>[]\n", max_size=9),
    st.lists(st.integers(0, 300), max_size=20),
)
def test_written_calls_come_back(
    calls: list[tuple[str, dict[str, Any]]], before: str, places: list[int]
) -> None:
    written = [HERMES.before_arguments(name) + json.dumps(a) + "}" for name, a in calls]
    text = before + "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in written)
    content, found = split(cut(text, places))
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert content == (before.rstrip() if calls else before)
