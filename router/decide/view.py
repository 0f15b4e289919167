"""What a decision needs to know about a request, and nothing else of it."""

import math
import re
from collections.abc import Iterable, Sequence

import msgspec

from engine_core.openai import ChatRequest, CompletionRequest, Message

TOKENS_PER_ASCII_CHARACTER = 0.4
TOKENS_PER_OTHER_BYTE = 0.75
"""Cautious: SmolLM2's small vocabulary takes 0.23 (English), 0.27 (code) and 0.36 (LaTeX) tokens per
ASCII character and 0.62 per UTF-8 byte of Chinese; larger vocabularies take less."""
TOKENS_PER_MESSAGE = 8
TOKENS_OF_TEMPLATE = 32
"""Role marks, and the system prompt that some chat templates add by themselves."""
SAMPLE_CHARS = 1000
"""Of a longer text in another script this much is looked at to tell the bytes per character."""

_CONTINUATIONS = """yes yeah yep ok okay sure please go on ahead continue next more do it that again
    proceed right correct keep going retry commit apply
    是 是的 好 好的 好吧 可以 行 嗯 对 对的 继续 请继续 继续吧 好的继续 继续说 继续写 接着说 接着写 下一步 再来一次 再试一次
    """
CONTINUATIONS = frozenset(_CONTINUATIONS.split())
"""Words that make no sense without the ask before them."""
_LONGEST_CONTINUATION = 40  # characters
_WORD = re.compile(r"\w+")


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the decision sees it.

    Args:
        ask: What the person last asked for; with the ask before it if it only says "go on".
        prompt_tokens: Estimate of its tokens, rather too many than too few.
        new_tokens: Limit on generated tokens, None if the client set none.
        needs: What a target must be able to do beyond answering text with text: `tools`,
            `custom_tools`, `functions`, `json`, `images`, `audio`, `logprobs`, `n`, `logit_bias`,
            `web_search`, `moderation`, `suffix`, `echo`, `best_of`, `prompts`.
        parts: Of the needs `images` and `audio`, where in the body the first such part is.
    """

    ask: str
    prompt_tokens: int
    new_tokens: int | None = None
    needs: frozenset[str] = frozenset()
    parts: dict[str, str] = {}


def view_chat(request: ChatRequest) -> RequestView:
    """Return the view of a chat request."""
    texts = [message.text() for message in request.messages]
    parts = _first_parts(request.messages)
    return RequestView(
        ask=_ask(request.messages, texts),
        prompt_tokens=_tokens(texts),
        new_tokens=request.new_tokens(),
        needs=_named(
            {
                "tools": _uses_tools(request),
                "custom_tools": _uses_custom_tools(request),
                "functions": _uses_functions(request),
                "json": (request.response_format or {}).get("type", "text") != "text",
                "images": "images" in parts,
                "audio": request.audio is not None
                or request.modalities not in (None, ["text"])
                or "audio" in parts,
                "logprobs": bool(request.logprobs or request.top_logprobs),
                "n": (request.n or 1) > 1,
                "logit_bias": bool(request.logit_bias),
                "web_search": request.web_search_options is not None,
                "moderation": request.moderation is not None,
            }
        ),
        parts=parts,
    )


def view_completion(request: CompletionRequest) -> RequestView:
    """Return the view of a plain completion; a prompt of token ids has no readable ask."""
    prompt = request.prompt
    texts = [prompt] if isinstance(prompt, str) else [p for p in prompt if isinstance(p, str)]
    ids = 0 if texts else len(prompt)
    return RequestView(
        ask="\n".join(texts),
        prompt_tokens=ids or _tokens(texts),
        new_tokens=request.new_tokens(),
        needs=_named(
            {
                "logprobs": request.logprobs is not None,
                "n": (request.n or 1) > 1,
                "logit_bias": bool(request.logit_bias),
                "suffix": bool(request.suffix),
                "echo": bool(request.echo),
                "best_of": request.best_of not in (None, request.n or 1),
                "prompts": len(texts) > 1,
            }
        ),
    )


def _ask(messages: Sequence[Message], texts: Sequence[str]) -> str:
    """Return the last human text, joined to the one before it if it makes no sense alone."""
    asks = (t for m, t in zip(reversed(messages), reversed(texts), strict=True) if m.role == "user")
    last = next(asks, texts[-1])
    if len(last) <= _LONGEST_CONTINUATION and CONTINUATIONS.issuperset(_WORD.findall(last.lower())):
        return f"{next(asks, '')}\n{last}".strip()
    return last


def _uses_tools(request: ChatRequest) -> bool:
    # With "none" a model may not call them, and one that could not loses nothing.
    return bool(
        (request.tools and request.tool_choice != "none")
        or request.tool_choice not in (None, "none", "auto")
        or any(m.role == "tool" or m.tool_calls for m in request.messages)
    )


def _uses_custom_tools(request: ChatRequest) -> bool:
    """Return whether a tool is no function, or the choice among them is no function or word."""
    tools = [*(request.tools or ()), *(c for m in request.messages for c in m.tool_calls or ())]
    if isinstance(request.tool_choice, dict):
        tools.append(request.tool_choice)
    return any(tool.get("type") != "function" for tool in tools)


def _uses_functions(request: ChatRequest) -> bool:
    """Return whether the old form of tools is used."""
    return bool(
        request.functions
        or request.function_call not in (None, "none", "auto")
        or any(m.role == "function" or m.function_call for m in request.messages)
    )


def _first_parts(messages: Iterable[Message]) -> dict[str, str]:
    """Return where the first part is that needs `images` or `audio`; a file counts as an image."""
    first: dict[str, str] = {}
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for at, part in enumerate(message.content):
            kind = part.get("type")
            if isinstance(kind, str) and kind != "text":
                need = "audio" if kind == "input_audio" else "images"
                first.setdefault(need, f"messages[{index}].content[{at}]")
    return first


def _named(needs: dict[str, bool]) -> frozenset[str]:
    return frozenset(name for name, needed in needs.items() if needed)


def _tokens(texts: Sequence[str]) -> int:
    marks = TOKENS_OF_TEMPLATE + TOKENS_PER_MESSAGE * len(texts)
    return marks + math.ceil(sum(map(_text_tokens, texts)))


def _text_tokens(text: str) -> float:
    if text.isascii():
        return TOKENS_PER_ASCII_CHARACTER * len(text)
    half = SAMPLE_CHARS // 2
    sample = text if len(text) <= SAMPLE_CHARS else text[:half] + text[-half:]
    # Characters beyond ASCII are taken to be of three bytes, two of which are extra.
    extra = len(sample.encode("utf-8", "surrogatepass")) - len(sample)
    tokens = TOKENS_PER_ASCII_CHARACTER * (len(sample) - extra / 2)
    tokens += TOKENS_PER_OTHER_BYTE * 1.5 * extra
    return tokens / len(sample) * len(text)
