"""Render a conversation into a prompt with the model's own chat template.

Templates come with model files and are foreign code: they run in jinja2's immutable sandbox, which
keeps them from the interpreter and the file system. It does not bound their running time, so only
models that one trusts to that degree belong in the store.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_core.errors import InvalidRequestError, ModelError
from engine_core.tool_calls import PROBE_TOOL, PROBE_TURNS, ToolFormat, find_format

MAX_RENDERED_CHARS = 16 << 20
"""Longest prompt that a template may write; about four million tokens."""


class _Generation(Extension):
    """`{% generation %}` marks training targets in some templates; to a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which a prompt must not have.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: jinja2 text in the dialect of Hugging Face's `apply_chat_template`.
        variables: What the template may use besides the messages: `bos_token`, `eos_token`, ….

    Raises:
        ModelError: the template has a syntax error.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(
                f"The model's chat template has an error: {error}. Take a newer copy of the model."
            ) from error
        self._variables = dict(variables)
        self.tool_format: ToolFormat | None = self._find_tool_format()
        """How it writes tool calls; None if it knows no tools or writes calls in another way."""

    def _find_tool_format(self) -> ToolFormat | None:
        question = [{"role": "user", "content": "How deep is it?"}]
        try:
            prompt = self.render(question, [PROBE_TOOL])
            history = self.render([*question, *PROBE_TURNS], [PROBE_TOOL])
        except InvalidRequestError:
            return None
        return find_format(prompt, history)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt, ending where the assistant is to go on.

        Args:
            messages: Turns as templates know them: `role` and `content` are text, the arguments of
                `tool_calls` are objects.
            tools: What the assistant may call, as in OpenAI's API.

        Raises:
            InvalidRequestError: the template refuses or cannot render the messages, or the prompt
                passes `MAX_RENDERED_CHARS`.
        """
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED_CHARS:
                    break
        except TemplateError as error:
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except Exception as error:  # a template is foreign code and may raise anything
            raise InvalidRequestError(
                "The model's chat template cannot render these messages "
                f"({type(error).__name__}); check their roles and contents.",
                param="messages",
            ) from error
        if length > MAX_RENDERED_CHARS:
            raise InvalidRequestError(
                f"The rendered prompt is longer than {MAX_RENDERED_CHARS:,} characters.",
                param="messages",
                code="context_length_exceeded",
            )
        return "".join(pieces)
