"""What a request wants of tools: which to offer, and whether to insist on a call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from engine_core.errors import InvalidRequestError
from engine_core.grammar import Grammar
from engine_core.openai import ChatRequest, Name, parse_body
from engine_core.tool_calls import ToolFormat, ToolSplitter
from engine_core.tool_grammar import tool_grammar


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments; without parameters there are none."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}

    def shown(self) -> dict[str, Any]:
        """Return the function as chat templates know it."""
        function = {
            "name": self.name,
            "description": self.description or "",
            "parameters": self.schema(),
        }
        return {"type": "function", "function": function}


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Function


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _Named


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that are offered to the model.

    Args:
        form: How it writes calls.
        shown: For its chat template.
        names: What it may call.
        parallel: Whether it may make several calls in one answer.
        grammar: What the answer must match for the sake of tools; None for any text.
    """

    form: ToolFormat
    shown: list[dict[str, Any]]
    names: frozenset[str]
    parallel: bool
    grammar: Grammar | None

    def splitter(self) -> ToolSplitter:
        """Return what takes the calls out of one choice's text."""
        return ToolSplitter(self.form, self.names, parallel=self.parallel)


def read_tools(
    request: ChatRequest, form: ToolFormat | None, model: str, answer: Grammar | None
) -> ToolUse | None:
    """Return what to do about tools, None if the model is to have none.

    Args:
        request: The client's.
        form: How the model writes calls; None if it cannot be offered tools.
        model: Its name.
        answer: What an answer without calls must match.

    Raises:
        InvalidRequestError: says what is wrong with `tools` or `tool_choice`.
    """
    functions = [tool.function for tool in parse_body(request.tools or [], list[_Tool], "tools")]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequestError("Two of the 'tools' have the same name.", param="tools")
    for at, function in enumerate(functions):
        if function.schema()["type"] != "object":
            where = f"tools[{at}].function.parameters.type"
            raise InvalidRequestError(f"'{where}' must be object.", param=where)
    mode, only = _choice(request.tool_choice, names)
    # With "none" the tools are not even shown: what a model does not know it does not call.
    if not functions or mode == "none":
        return None
    if form is None:
        raise InvalidRequestError(
            f"The chat template of {model} offers no tools, or in a form that this engine does not "
            "know; leave out 'tools' or use another model.",
            param="tools",
            code="unsupported_parameter",
        )
    offered = [function for function in functions if only in (None, function.name)]
    must_call = mode == "required"
    if answer is not None and not (must_call or form.opening):
        raise InvalidRequestError(
            f"{model} writes a call as an answer in JSON, so 'response_format' can go together with "
            "'tools' only if 'tool_choice' requires a call.",
            param="response_format",
            code="unsupported_parameter",
        )
    parallel = request.parallel_tool_calls is not False and only is None
    grammar = None
    if must_call or answer is not None or any(function.strict for function in offered):
        grammar = tool_grammar(
            form,
            {function.name: function.schema() for function in offered},
            must_call=must_call,
            parallel=parallel,
            answer=answer,
        )
    return ToolUse(
        form=form,
        shown=[function.shown() for function in functions],
        names=frozenset(function.name for function in offered),
        parallel=parallel,
        grammar=grammar,
    )


def _choice(raw: Any, names: Sequence[str]) -> tuple[str, str | None]:
    """Return `none`, `auto` or `required`, and the only function that may be called, if there is."""
    mode, only = "auto", None
    if isinstance(raw, dict):
        mode, only = "required", parse_body(raw, _Choice, "tool_choice").function.name
        if only not in names:
            raise InvalidRequestError(
                "'tool_choice.function.name' is not among the 'tools'.",
                param="tool_choice.function.name",
            )
    elif raw is not None:
        mode = raw
    if mode not in ("none", "auto", "required"):
        raise InvalidRequestError(
            "'tool_choice' must be none, auto, required or a function.", param="tool_choice"
        )
    if mode == "required" and not names:
        raise InvalidRequestError("This 'tool_choice' needs 'tools'.", param="tool_choice")
    return mode, only
