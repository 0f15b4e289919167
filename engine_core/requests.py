"""What a client's body means to an engine: a generation request, or a refusal that names a field.

What this engine cannot do is refused, never silently dropped. Left out on purpose are fields that
ask for nothing in the answer: who asks (`user`, `safety_identifier`), bookkeeping (`metadata`,
`store`, `service_tier`), hints on speed (`prediction`, `prompt_cache_key`,
`prompt_cache_retention`, `include_obfuscation`), hints on style (`reasoning_effort`, `verbosity`)
and what means nothing without tools (`parallel_tool_calls`). `model` is not compared either: one
engine serves one model, and names are resolved before a request gets here.
"""

import uuid
from dataclasses import dataclass
from typing import Any

from engine_core.errors import InvalidRequestError
from engine_core.openai import (
    ChatRequest,
    CompletionRequest,
    Message,
    parse_body,
    parse_json_object,
)
from engine_core.types import ChatTokenizer, Engine, GenerationRequest

COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of plain completions. Chat has none but the context window."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request and how its answer is to be delivered."""

    generation: GenerationRequest
    chat: bool
    stream: bool
    usage_chunk: bool


def read_chat(body: bytes, engine: Engine) -> Ask:
    """Turn a body of `POST /v1/chat/completions` into a request. Takes long for long texts.

    Raises:
        InvalidRequestError: says which field is wrong or cannot be honoured.
    """
    request = parse_body(parse_json_object(body), ChatRequest)
    _refuse_chat(request)
    messages = [_message(at, message) for at, message in enumerate(request.messages)]
    return _ask(request, tuple(engine.tokenizer.encode_chat(messages)), "messages", engine)


def read_completion(body: bytes, engine: Engine) -> Ask:
    """Turn a body of `POST /v1/completions` into a request. Takes long for long texts.

    Raises:
        InvalidRequestError: says which field is wrong or cannot be honoured.
    """
    request = parse_body(parse_json_object(body), CompletionRequest)
    _refuse_completion(request)
    return _ask(request, _prompt_ids(request.prompt, engine.tokenizer), "prompt", engine)


def _ask(
    request: ChatRequest | CompletionRequest,
    prompt_ids: tuple[int, ...],
    param: str,
    engine: Engine,
) -> Ask:
    if not prompt_ids:
        raise InvalidRequestError(f"'{param}' is empty: there is nothing to go on.", param=param)
    window = engine.context_window
    if len(prompt_ids) >= window:
        raise InvalidRequestError(
            f"The prompt has {len(prompt_ids)} tokens, and the context window of {engine.model} is "
            f"{window} tokens including the answer; shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
    chat = isinstance(request, ChatRequest)
    return Ask(
        generation=GenerationRequest(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            prompt_ids=prompt_ids,
            max_tokens=request.new_tokens() or (window if chat else COMPLETION_TOKENS),
            sampling=request.sampling(),
            stop=request.stop_strings(),
            continues=not chat,
        ),
        chat=chat,
        stream=bool(request.stream),
        usage_chunk=request.wants_usage(),
    )


def _refuse_chat(request: ChatRequest) -> None:
    response_format = request.response_format or {"type": "text"}
    refused = {
        "tools": bool(request.tools),
        "tool_choice": request.tool_choice not in (None, "none", "auto"),
        "functions": bool(request.functions),
        "function_call": request.function_call not in (None, "none", "auto"),
        "logprobs": bool(request.logprobs),
        "top_logprobs": bool(request.top_logprobs),
        "response_format": response_format.get("type") != "text",
        "modalities": request.modalities not in (None, ["text"]),
        "audio": request.audio is not None,
        "web_search_options": request.web_search_options is not None,
    }
    _refuse(refused | _refused_of_both(request))


def _refuse_completion(request: CompletionRequest) -> None:
    refused = {
        "suffix": bool(request.suffix),
        "echo": bool(request.echo),
        "best_of": (request.best_of or 1) > 1,
        "logprobs": request.logprobs is not None,
    }
    _refuse(refused | _refused_of_both(request))


def _refused_of_both(request: ChatRequest | CompletionRequest) -> dict[str, bool]:
    return {
        "n": (request.n or 1) > 1,
        "logit_bias": bool(request.logit_bias),
        "stream_options": request.stream_options is not None and not request.stream,
    }


def _refuse(refused: dict[str, bool]) -> None:
    for field, wrong in refused.items():
        if wrong and field == "stream_options":
            raise InvalidRequestError(
                "'stream_options' is only allowed when 'stream' is true.", param=field
            )
        if wrong:
            raise InvalidRequestError(
                f"This engine does not support '{field}' with this value.",
                param=field,
                code="unsupported_parameter",
            )


def _message(at: int, message: Message) -> dict[str, Any]:
    """Return the turn as chat templates know it: a role and a text."""
    where = f"messages[{at}]"
    if message.role in ("tool", "function"):
        raise _unsupported(f"{where}.role", "turns of tools")
    for field in ("tool_calls", "function_call", "audio"):
        if getattr(message, field):
            raise _unsupported(f"{where}.{field}", "tool calls and audio")
    if isinstance(message.content, list):
        for part in message.content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise _unsupported(f"{where}.content", "parts that are not text")
    elif message.content is None:
        raise InvalidRequestError(f"'{where}.content' is missing.", param=f"{where}.content")
    # OpenAI renamed `system` to `developer`; the templates of open models know only the former.
    role = "system" if message.role == "developer" else message.role
    turn = {"role": role, "content": message.text()}
    return turn if message.name is None else turn | {"name": message.name}


def _unsupported(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"This engine does not support {what}, as in '{param}'.",
        param=param,
        code="unsupported_parameter",
    )


def _prompt_ids(prompt: str | list[str | int], tokenizer: ChatTokenizer) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    texts = [part for part in prompt if isinstance(part, str)]
    ids = [part for part in prompt if isinstance(part, int)]
    if len(texts) == 1 and not ids:
        return tuple(tokenizer.encode(texts[0]))
    if texts:
        raise InvalidRequestError(
            "One request takes one prompt: a text, or a list of token ids.", param="prompt"
        )
    if not all(0 <= part < tokenizer.vocab_size for part in ids):
        raise InvalidRequestError(
            f"Token ids go from 0 to {tokenizer.vocab_size - 1}.", param="prompt"
        )
    return tuple(ids)
