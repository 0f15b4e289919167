"""One parsed request: what the client wants, ready to be decided on and sent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_core.openai import (
    ChatRequest,
    CompletionRequest,
    parse_body,
    parse_json_object,
)
from router.decide.view import RequestView, view_chat, view_completion


@dataclass(frozen=True, slots=True)
class Call:
    """A valid request.

    `raw` is the client's body as it came; a target gets it with only the model's name changed.
    """

    raw: dict[str, Any]
    view: RequestView
    model: str
    stream: bool
    choices: int
    """How many answers the client waits for."""

    def body_for(self, model: str) -> bytes:
        """Return the JSON to send to a target that knows its model by this name."""
        return msgspec.json.encode({**self.raw, "model": model})


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint that a model answers.

    Args:
        name: Label in metrics and logs.
        path: Below a target's base URL.
        read: Parses and checks a body; raises `InvalidRequestError`.
    """

    name: str
    path: str
    read: Callable[[bytes], Call]


def _read_chat(body: bytes) -> Call:
    raw = parse_json_object(body)
    request = parse_body(raw, ChatRequest)
    return Call(raw, view_chat(request), request.model, bool(request.stream), request.n or 1)


def _read_completion(body: bytes) -> Call:
    raw = parse_json_object(body)
    request = parse_body(raw, CompletionRequest)
    prompts = 1
    if isinstance(request.prompt, list) and request.prompt and isinstance(request.prompt[0], str):
        prompts = len(request.prompt)
    choices = prompts * (request.n or 1)
    return Call(raw, view_completion(request), request.model, bool(request.stream), choices)


CHAT = Route("chat", "/chat/completions", _read_chat)
COMPLETIONS = Route("completions", "/completions", _read_completion)
