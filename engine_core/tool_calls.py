"""Tool calls in the text of a model: how families of models write them, and how to read them.

A format is not looked up by a model's name. It is found by letting the model's own chat template
write down a call that is known, so that a template without tools, or with a way of its own, is
told apart from one that is understood here.
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    Args:
        opening: Text before a call; nothing where a call is the whole answer.
        closing: Text after it; nothing where a call goes on to the end of the answer.
        arguments: What the member of the call's JSON object with the arguments is called.
        listed: Calls stand in one JSON list instead of one after the other.
        short_ids: Its templates take ids of nine letters and digits only.
    """

    opening: str
    closing: str
    arguments: str = "arguments"
    listed: bool = False
    short_ids: bool = False

    def before_arguments(self, name: str) -> str:
        """Return how the JSON object of a call begins; after the arguments comes its brace."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": '


HERMES = ToolFormat("<tool_call>", "</tool_call>")
"""Hermes 2 and 3, Qwen 2.5 and 3: a JSON object between tags."""
MISTRAL = ToolFormat("[TOOL_CALLS]", "", listed=True, short_ids=True)
"""Mistral up to version 7 of its tokenizer: a JSON list after a mark."""
LLAMA = ToolFormat("", "", arguments="parameters")
"""Llama 3.1: one JSON object and nothing else."""

TOOL_MARKS = frozenset({HERMES.opening, HERMES.closing, MISTRAL.opening})
"""What must stay readable in an answer, even where it is a control token of the model."""

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"depth": {"type": "integer"}}},
    },
}
"""A tool to show to a chat template, and below a turn that calls it."""
_PROBE_NAME = "probe_tool"
_PROBE_CALL = {"name": _PROBE_NAME, "arguments": {"depth": 7}}
_PROBE_ID = "probe0007"
PROBE_TURNS: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _PROBE_ID, "type": "function", "function": _PROBE_CALL}],
    },
    {"role": "tool", "content": "7 m", "tool_call_id": _PROBE_ID, "name": _PROBE_NAME},
]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


def find_format(prompt: str, history: str) -> ToolFormat | None:
    """Return the format in which a chat template writes calls, None if it is none of these.

    Args:
        prompt: What the template made of a question and `PROBE_TOOL`.
        history: What it made of the same and then `PROBE_TURNS`.
    """
    if _PROBE_NAME not in prompt:
        return None
    for form in (HERMES, MISTRAL):
        at = -1
        while (at := history.find(form.opening, at + 1)) >= 0:
            if _is_probe_call(history[at + len(form.opening) :], form):
                return form
    if history.startswith(prompt) and _is_probe_call(history[len(prompt) :], LLAMA):
        return LLAMA
    return None


def _is_probe_call(text: str, form: ToolFormat) -> bool:
    try:
        call, end = json.JSONDecoder().raw_decode(text.lstrip())
    except ValueError:
        return False
    if form.listed:
        call = call[0] if isinstance(call, list) and call else None
    return (
        isinstance(call, dict)
        and call.get("name") == _PROBE_NAME
        and call.get(form.arguments) == _PROBE_CALL["arguments"]
        and text.lstrip()[end:].lstrip().startswith(form.closing)
    )


class _Written(msgspec.Struct):
    """A call as a model writes it; what else it writes is left out."""

    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def call(self) -> ToolCall:
        text = self.parameters if self.arguments is msgspec.UNSET else self.arguments
        raw = b"{}" if isinstance(text, msgspec.UnsetType) else bytes(text)
        msgspec.json.decode(raw, type=dict[str, Any])
        return ToolCall(self.name, raw.decode())


_STRING = r'"(?:[^"\\\n]|\\.)*+(?:"|\\?\Z)'
"""A string of JSON, perhaps cut off at the end of the text; a raw line break is in none."""
_decode = msgspec.json.Decoder(_Written | list[_Written]).decode


def read_calls(text: str, tools: Collection[str]) -> list[ToolCall]:
    """Read the JSON of one call or of a list of calls; nothing if it is not all that.

    Args:
        text: JSON, perhaps.
        tools: Names that may be called.
    """
    try:
        written = _decode(text)
        calls = [each.call() for each in (written if isinstance(written, list) else [written])]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return calls if all(call.name in tools for call in calls) else []


class ToolSplitter:
    """Takes the calls out of a text that comes in pieces.

    What comes out does not depend on the pieces, and no part of a call is ever given out as text.
    What looks like a call and is none, because its JSON is damaged or it names an unknown tool, is
    text after all. Blanks beside a call are left out.

    Args:
        form: How the model writes calls.
        tools: Names that may be called.
        parallel: Whether there may be more than one call; otherwise the first one counts.
    """

    def __init__(self, form: ToolFormat, tools: Collection[str], *, parallel: bool) -> None:
        self._form = form
        self._tools = tools
        self._parallel = parallel
        self._held = ""
        self._blanks = ""  # given out once text follows, or the end
        self._spoken = False
        self._called = False
        self._after_call = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Take the next piece; return the text and the calls that are certain now."""
        self._held += text
        return list(self._take(ended=False))

    def flush(self) -> list[str | ToolCall]:
        """Return what is left at the end of the answer."""
        pieces = list(self._take(ended=True))
        if self._blanks:
            pieces.append(self._blanks)
            self._blanks = ""
        return pieces

    def _take(self, *, ended: bool) -> Iterator[str | ToolCall]:
        opening, closing = self._form.opening, self._form.closing
        while self._held:
            at = self._find_opening()
            if at is None:
                yield from self._say(len(self._held) - (0 if ended else self._begun_opening()))
                return
            end = self._find_closing(at + len(opening))
            if end is None:
                if not ended:
                    yield from self._say(at)
                    return
                end = len(self._held)
            # An opening may also be mentioned in the text; then the last one is the call's.
            for begin in dict.fromkeys((at, self._held.rfind(opening, at, end))):
                calls = read_calls(self._held[begin + len(opening) : end], self._tools)
                if calls:
                    yield from self._say(begin)
                    yield from self._call(calls)
                    self._held = self._held[end - begin + len(closing) :]
                    break
            else:
                yield from self._say(end + len(closing))

    def _find_opening(self) -> int | None:
        """Return where a call may begin."""
        if self._form.opening:
            at = self._held.find(self._form.opening)
            return at if at >= 0 else None
        text = self._held.lstrip()
        whole = text.startswith(("{", "[")) and not self._spoken
        return len(self._held) - len(text) if whole else None

    def _find_closing(self, begin: int) -> int | None:
        """Return where a call ends that begins there; not in a string, which may hold any text."""
        closing = self._form.closing
        end = self._held.find(closing, begin) if closing else -1
        if end >= 0 and self._held[begin:end].lstrip().startswith(("{", "[")):
            marks = re.finditer(f"{_STRING}|{re.escape(closing)}", self._held[begin:])
            end = next((begin + mark.start() for mark in marks if mark[0] == closing), -1)
        return end if end >= 0 else None

    def _begun_opening(self) -> int:
        """Return how long the end of the text is with which an opening may begin."""
        opening = self._form.opening
        longest = min(len(opening) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(opening[:n])), 0)

    def _say(self, length: int) -> Iterator[str]:
        """Give out the beginning of what is held, but keep blanks at its end."""
        text, self._held = self._held[:length], self._held[length:]
        text = text.lstrip() if self._after_call else self._blanks + text
        said = text.rstrip()
        self._blanks = text[len(said) :]
        if said:
            self._spoken, self._after_call = True, False
            yield said

    def _call(self, calls: list[ToolCall]) -> Iterator[ToolCall]:
        if not self._parallel:
            calls = [] if self._called else calls[:1]
        self._blanks = ""
        self._called = self._after_call = True
        yield from calls
