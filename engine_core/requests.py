"""What a client's body means to an engine: generation requests, or a refusal that names a field.

What an engine cannot do is refused, never silently dropped; `engine_core.parameters` has the list.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from engine_core.errors import InvalidRequestError
from engine_core.grammar import Grammar
from engine_core.openai import (
    ChatRequest,
    CompletionRequest,
    parse_body,
    parse_json_object,
)
from engine_core.parameters import CHAT, COMPLETION, refuse
from engine_core.response_format import read_response_format
from engine_core.tools import ToolUse, read_tools
from engine_core.turns import read_turns
from engine_core.types import ChatTokenizer, Engine, GenerationRequest, Sampling
from engine_core.urgency import Urgency

COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of plain completions. Chat has none but the context window."""
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request and how its answer is to be delivered.

    Args:
        generations: One for each choice; the first one's id names the answer.
        chat: Whether it is a chat.
        stream: Whether the answer is streamed.
        usage_chunk: Whether a stream ends with a chunk of usage.
        tools: What the model may call; None if it may call nothing.
    """

    generations: tuple[GenerationRequest, ...]
    chat: bool
    stream: bool
    usage_chunk: bool
    tools: ToolUse | None = None

    @property
    def logprobs(self) -> bool:
        """Whether the answer tells log probabilities."""
        return self.generations[0].logprobs is not None

    @property
    def grammar(self) -> Grammar | None:
        """What the text of every choice must match."""
        return self.generations[0].grammar


Read = Callable[[bytes, Engine, Urgency], Ask]


def read_chat(body: bytes, engine: Engine, urgency: Urgency) -> Ask:
    """Turn a body of `POST /v1/chat/completions` into a request. Takes long for long texts.

    Raises:
        InvalidRequestError: says which field is wrong or cannot be honoured.
    """
    request = parse_body(parse_json_object(body), ChatRequest)
    refuse(request, CHAT)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError(
            "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
        )
    tokenizer = engine.tokenizer
    answer = read_response_format(request.response_format)
    tools = read_tools(request, tokenizer.tool_format, engine.model, answer)
    turns = read_turns(request.messages, tokenizer.tool_format)
    ids = tokenizer.encode_chat(turns, tools.shown if tools else None)
    return Ask(
        generations=_generations(
            request,
            _checked(ids, "messages", engine),
            engine,
            urgency,
            max_tokens=request.new_tokens() or engine.context_window,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            grammar=tools.grammar if tools else answer,
        ),
        chat=True,
        stream=bool(request.stream),
        usage_chunk=_usage_chunk(request),
        tools=tools,
    )


def read_completion(body: bytes, engine: Engine, urgency: Urgency) -> Ask:
    """Turn a body of `POST /v1/completions` into a request. Takes long for long texts.

    Raises:
        InvalidRequestError: says which field is wrong or cannot be honoured.
    """
    request = parse_body(parse_json_object(body), CompletionRequest)
    refuse(request, COMPLETION)
    return Ask(
        generations=_generations(
            request,
            _checked(_prompt_ids(request.prompt, engine.tokenizer), "prompt", engine),
            engine,
            urgency,
            max_tokens=request.new_tokens() or COMPLETION_TOKENS,
            logprobs=request.logprobs,
            grammar=None,
        ),
        chat=False,
        stream=bool(request.stream),
        usage_chunk=_usage_chunk(request),
    )


def _checked(ids: list[int], param: str, engine: Engine) -> tuple[int, ...]:
    """Return the prompt if there is one and the context window has room for it and an answer."""
    if not ids:
        raise InvalidRequestError(f"'{param}' is empty: there is nothing to go on.", param=param)
    window = engine.context_window
    if len(ids) >= window:
        raise InvalidRequestError(
            f"The prompt has {len(ids)} tokens, and the context window of {engine.model} is "
            f"{window} tokens including the answer; shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )
    return tuple(ids)


def _generations(
    request: ChatRequest | CompletionRequest,
    prompt_ids: tuple[int, ...],
    engine: Engine,
    urgency: Urgency,
    *,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None,
) -> tuple[GenerationRequest, ...]:
    """Return a request for each choice; they differ in nothing but their seeds.

    Raises:
        InvalidRequestError: the engine could never hold so many at once, or a biased id is wrong.
    """
    chat = isinstance(request, ChatRequest)
    choices = request.n or 1
    if choices > engine.most_requests:
        raise InvalidRequestError(
            f"'n' is at most {engine.most_requests} on this engine: so many requests, running and "
            "waiting, are all that it holds at once. Ask for fewer choices.",
            param="n",
            code="too_many_choices",
        )
    id_ = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    given = {name: v for name in _SAMPLING if (v := getattr(request, name)) is not None}
    bias = _logit_bias(request.logit_bias or {}, engine.tokenizer)
    return tuple(
        GenerationRequest(
            id=f"{id_}-{choice}" if choice else id_,
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=Sampling(
                # The first choice is the one that there would be alone.
                seed=None if request.seed is None else request.seed + choice,
                logit_bias=bias,
                **given,
            ),
            stop=tuple(stop),
            continues=not chat,
            logprobs=logprobs,
            grammar=grammar,
            cache_salt=request.cache_salt or "",
            priority=urgency.priority,
            deadline=urgency.deadline,
        )
        for choice in range(choices)
    )


def _usage_chunk(request: ChatRequest | CompletionRequest) -> bool:
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequestError(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    return options is not None and options.include_usage


def _logit_bias(
    biases: dict[str, float], tokenizer: ChatTokenizer
) -> tuple[tuple[int, float], ...]:
    for id_ in biases:
        digits = id_.isascii() and id_.isdecimal() and len(id_) < 10
        # Written in one way only, so that no id is there twice.
        if not digits or str(int(id_)) != id_ or int(id_) >= tokenizer.vocab_size:
            raise InvalidRequestError(
                f"The keys of 'logit_bias' are token ids from 0 to {tokenizer.vocab_size - 1}.",
                param="logit_bias",
            )
    return tuple((int(id_), bias) for id_, bias in biases.items())


def _prompt_ids(prompt: str | list[str | int], tokenizer: ChatTokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    texts = [part for part in prompt if isinstance(part, str)]
    ids = [part for part in prompt if isinstance(part, int)]
    if len(texts) == 1 and not ids:
        return tokenizer.encode(texts[0])
    if texts:
        raise InvalidRequestError(
            "One request takes one prompt: a text, or a list of token ids.", param="prompt"
        )
    if not all(0 <= part < tokenizer.vocab_size for part in ids):
        raise InvalidRequestError(
            f"Token ids go from 0 to {tokenizer.vocab_size - 1}.", param="prompt"
        )
    return ids
