"""Every parameter of OpenAI's two completion endpoints, and what our engines do with it.

The tables are the truth: requests are refused by them, and the reference in `docs/engines.md` is
written from them. Both engines read requests with the same code, so one table serves both.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from engine_core.errors import InvalidRequestError

Fate = Literal["supported", "refused", "ignored"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field of a request's body.

    Args:
        name: As on the wire.
        fate: `refused` if a value that asks for something is a 400, `ignored` if the answer is the
            same whatever it says.
        note: For the reference: limits, and why something is ignored.
        asks: Of a refused one, whether a request asks for anything with it.
        instead: Of a refused one, what the client should do.
    """

    name: str
    fate: Fate
    note: str = ""
    asks: Callable[[Any], bool] = lambda _: False
    instead: str = "leave it out"


def _yes(name: str, note: str = "") -> Parameter:
    return Parameter(name, "supported", note)


def _ignored(name: str, note: str) -> Parameter:
    return Parameter(name, "ignored", note)


_SAMPLING = (
    _yes("frequency_penalty", "-2 to 2"),
    _yes("logit_bias", "up to 300 token ids of the model, each -100 to 100"),
    _yes("n", "1 to 16, no more than fit at once (below); the seed of choice *i* is `seed` + *i*"),
    _yes("presence_penalty", "-2 to 2"),
    _yes("seed", "the same seed gives the same text, in any [company](#seeds-and-company)"),
    _yes("stop", "up to 4 texts of 1 to 64 characters"),
    _yes("stream", "server-sent events; `[DONE]` ends a whole answer"),
    _yes(
        "stream_options", "only with `stream`; `include_obfuscation` is ignored: nothing is padded"
    ),
    _yes("temperature", "0 to 2; 0 takes the likeliest token"),
    _yes("top_p", "above 0, up to 1"),
)
_USER = _ignored("user", "names the client's user; nothing depends on it")

CHAT = (
    _yes("messages", "text; tool turns where the model can call tools; other parts are refused"),
    _ignored("model", "an engine serves one model; the router resolves names before it"),
    Parameter("audio", "refused", "engines answer in text", asks=lambda r: r.audio is not None),
    Parameter(
        "function_call",
        "refused",
        "the old form of `tool_choice`",
        lambda r: r.function_call not in (None, "none", "auto"),
        "use 'tool_choice'",
    ),
    Parameter(
        "functions",
        "refused",
        "the old form of `tools`",
        lambda r: bool(r.functions),
        "use 'tools'",
    ),
    _yes("logprobs", "of the model's own distribution, over the whole text of the answer"),
    _yes(
        "max_completion_tokens", "without it the answer ends with the context window at the latest"
    ),
    _yes("max_tokens", "the old name of `max_completion_tokens`, which wins"),
    _ignored("metadata", "bookkeeping; nothing is stored"),
    Parameter(
        "modalities",
        "refused",
        'only `["text"]` is taken',
        lambda r: r.modalities not in (None, ["text"]),
    ),
    Parameter(
        "moderation", "refused", "engines moderate nothing", asks=lambda r: r.moderation is not None
    ),
    _yes("parallel_tool_calls", "where it is false, an answer has one call at most"),
    _ignored("prediction", "a hint on speed"),
    _ignored("prompt_cache_key", "a hint on speed; prompts are cached without it"),
    _ignored("prompt_cache_options", "a hint on speed; prompts are cached without it"),
    _ignored("prompt_cache_retention", "a hint on speed; prompts are cached without it"),
    _ignored("reasoning_effort", "a hint on style"),
    _yes(
        "response_format",
        "`text`, `json_object`, `json_schema`; enforced in either case of `strict`; the model is not "
        "shown the schema",
    ),
    _ignored("safety_identifier", "names the client's user; nothing depends on it"),
    _ignored("service_tier", "there is one; see `x-tidegate-class` below"),
    _ignored("store", "nothing is stored"),
    _yes("tool_choice", "`none`, `auto`, `required` or one function; `allowed_tools` is refused"),
    _yes(
        "tools",
        "functions, where the model's chat template writes calls as Hermes and Qwen, Llama 3 or "
        "Mistral do; refused for other models",
    ),
    _yes("top_logprobs", "0 to 20, only with `logprobs`"),
    _USER,
    _ignored("verbosity", "a hint on style"),
    Parameter(
        "web_search_options",
        "refused",
        "engines search nothing",
        lambda r: r.web_search_options is not None,
    ),
    *_SAMPLING,
)
"""Body of `POST /v1/chat/completions`."""

COMPLETION = (
    _ignored("model", "an engine serves one model; the router resolves names before it"),
    _yes("prompt", "one text or one list of token ids; several prompts are refused"),
    Parameter(
        "best_of",
        "refused",
        "unless it equals `n`",
        lambda r: r.best_of is not None and r.best_of != (r.n or 1),
        "ask for 'n' choices",
    ),
    Parameter("echo", "refused", "the client has the prompt", asks=lambda r: bool(r.echo)),
    _yes("logprobs", "0 to 5; of the model's own distribution"),
    _yes("max_tokens", "16 by default, as in OpenAI's API"),
    Parameter("suffix", "refused", "engines fill no gaps", asks=lambda r: bool(r.suffix)),
    _USER,
    *_SAMPLING,
)
"""Body of `POST /v1/completions`."""

EXTRAS = (
    _yes("cache_salt", "1 to 256 characters; only prompts of the same salt share cached prefixes"),
    _yes("min_p", "0 to 1"),
    _yes("repetition_penalty", "above 0, up to 10"),
    _yes("top_k", "0 takes every token"),
)
"""Not OpenAI's, but what local servers agree on; both endpoints take them."""


def refuse(request: Any, table: Iterable[Parameter]) -> None:
    """Check a parsed request against its table.

    Raises:
        InvalidRequestError: it asks for something that our engines do not do.
    """
    for parameter in table:
        if parameter.fate == "refused" and parameter.asks(request):
            raise InvalidRequestError(
                f"This engine does not support '{parameter.name}' with this value; "
                f"{parameter.instead}.",
                param=parameter.name,
                code="unsupported_parameter",
            )
