"""What one event of an OpenAI stream means for the commit and for the end of the answer."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from router.guard.outcomes import CONTEXT_LENGTH_EXCEEDED, Outcome, UpstreamFailure
from router.targets.sse import SseEvent

DONE = b"[DONE]"
MESSAGE_CHARS = 600
"""An upstream's error sentence is cut here; what is longer repeats the request."""
RETRY_AFTER_DIGITS = 5
"""A `Retry-After` of more digits, over a day, is a mistake and not passed on."""


_INDEX = re.compile(r"(?<=[a-zA-Z0-9_\]])\[[0-9]{1,6}\](?=\.|\[|\Z)", re.ASCII)


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None

    def has_content(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.tool_calls
            or self.function_call
            or self.refusal
            or self.audio
        )


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    message: dict[str, Any] | None = None
    finish_reason: str | None = None

    def is_whole(self) -> bool:
        """Whether it is an answer that is not streamed, from its text to its end."""
        return bool(self.finish_reason) and (self.message is not None or self.text is not None)


class _Error(msgspec.Struct):
    message: Any = None
    code: Any = None
    param: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: _Error | str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | str | None = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)
_error_decoder = msgspec.json.Decoder(_ErrorBody)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a foreign document may raise; the last for one that is nested without end."""


class StreamProgress:
    """Follows one stream: has content come, and is the answer complete?

    Args:
        choices: How many choices the request asked for; all must finish.
        secrets: Texts that no error message may repeat.
    """

    __slots__ = ("_choices", "_finished", "_secrets", "committed", "done")

    def __init__(self, choices: int, secrets: Sequence[str] = ()) -> None:
        self._choices = choices
        self._finished: set[int] = set()
        self._secrets = secrets
        self.committed = False
        """A content, tool or reasoning delta, or a finish, has come."""
        self.done = False
        """The upstream has said `[DONE]`."""

    @property
    def complete(self) -> bool:
        """Whether every choice has its finish reason."""
        return len(self._finished) >= self._choices

    def take(self, event: SseEvent) -> None:
        """Account for one event.

        Raises:
            UpstreamFailure: an error frame, something that is no chunk, or a `[DONE]` before
                the end of the answer.
        """
        if event.data is None:
            return
        if event.data.strip() == DONE:
            if not self.complete:
                raise UpstreamFailure(
                    Outcome.UPSTREAM_ERROR, "The target ended its stream without a finish reason."
                )
            self.done = True
            return
        try:
            chunk = _chunk_decoder.decode(event.data)
        except _UNREADABLE:
            if event.event == b"error":
                raise error_failure(500, event.data, None, self._secrets) from None
            raise UpstreamFailure(
                Outcome.UPSTREAM_ERROR, "The target sent a stream event that is not a chunk."
            ) from None
        if chunk.error is not None or event.event == b"error":
            raise error_failure(500, event.data, None, self._secrets)
        for choice in chunk.choices or ():
            if choice.finish_reason:  # some servers send an empty one with every chunk
                self._finished.add(choice.index)
                self.committed = True
            elif choice.text or (choice.delta is not None and choice.delta.has_content()):
                self.committed = True


def check_answer(body: bytes, choices: int, secrets: Sequence[str] = ()) -> None:
    """Check the body of a non-streamed answer with status 200.

    Raises:
        UpstreamFailure: not JSON, an error in spite of its status, or choices without a text or an
            end.
    """
    try:
        answer = _chunk_decoder.decode(body)
    except _UNREADABLE:
        raise UpstreamFailure(
            Outcome.UPSTREAM_ERROR, "The target's answer is not an OpenAI completion."
        ) from None
    if answer.error is not None:
        raise error_failure(500, body, None, secrets)
    finished = {c.index for c in answer.choices or () if c.is_whole()}
    if len(finished) < choices:
        raise UpstreamFailure(Outcome.UPSTREAM_ERROR, "The target's answer is incomplete.")


def unstreamed_failure(body: bytes, secrets: Sequence[str] = ()) -> UpstreamFailure:
    """Explain an answer with status 200 that is no event stream though one was asked for."""
    if _read_error(body) != _Error():
        return error_failure(500, body, None, secrets)
    return UpstreamFailure(Outcome.UPSTREAM_ERROR, "The target did not answer with a stream.")


def error_failure(
    status: int, body: bytes, retry_after: str | None, secrets: Sequence[str] = ()
) -> UpstreamFailure:
    """Translate an upstream's error into what it means for the request.

    What is the client's mistake keeps its status and sentence. What is the upstream's or the
    operator's (5xx, a refused key, an unknown path or model) gets a sentence of ours, because
    theirs may name hosts and keys.

    Args:
        status: HTTP status; for an error inside a 200 stream, 500.
        body: The error document; may be anything.
        retry_after: Value of the `Retry-After` header.
        secrets: Texts that are blotted out of the upstream's sentence.
    """
    error = _read_error(body)
    if isinstance(error.code, int) and 400 <= error.code <= 599:
        status = error.code  # some gateways carry the status inside a 200 stream
    code = error.code if isinstance(error.code, str) and _is_word(error.code) else None
    wait = _seconds(retry_after)
    if code == CONTEXT_LENGTH_EXCEEDED or status in (400, 413, 415, 422):
        return UpstreamFailure(
            Outcome.INVALID,
            _sentence(error.message, secrets),
            status=status if status < 500 else 400,
            code=code,
            param=error.param if isinstance(error.param, str) and _is_path(error.param) else None,
        )
    if code == Outcome.DEADLINE:
        return UpstreamFailure(Outcome.DEADLINE, "The request's deadline has passed.")
    if status == 429:
        return UpstreamFailure(
            Outcome.RATE_LIMITED, "The target's rate limit is reached.", retry_after=wait
        )
    if status == 503:
        outcome = {
            "queue_full": Outcome.QUEUE_FULL,
            "memory_pressure": Outcome.MEM_REJECT,
        }.get(code or "", Outcome.UPSTREAM_ERROR)
        return UpstreamFailure(
            outcome, "The target has no room now.", status=503, code=code, retry_after=wait
        )
    if status in (401, 403):
        sentence = "The target refused Tidegate's key; check its key_file or key_env."
    elif status == 404:
        sentence = "The target does not know this path or model; check its url and model."
    else:
        sentence = f"The target failed with HTTP status {status}."
    return UpstreamFailure(Outcome.UPSTREAM_ERROR, sentence)


def _seconds(retry_after: str | None) -> int | None:
    """Return the seconds of a `Retry-After`; None for its other form, a date."""
    if not retry_after or len(retry_after) > RETRY_AFTER_DIGITS or not retry_after.isdecimal():
        return None
    return int(retry_after)


def _read_error(body: bytes) -> _Error:
    try:
        error = _error_decoder.decode(body).error
    except _UNREADABLE:
        return _Error()
    return _Error(message=error) if isinstance(error, str) else error or _Error()


def _sentence(message: Any, secrets: Sequence[str]) -> str:
    if not isinstance(message, str) or not message:
        return "The target refused the request."
    for secret in secrets:
        message = message.replace(secret, "[redacted]")
    return str(message[:MESSAGE_CHARS])


def _is_path(text: str) -> bool:
    """Say whether it can name a field: `top_p`, `messages[0].content[1].text`."""
    return _is_word(_INDEX.sub("", text))


def _is_word(text: str) -> bool:
    return len(text) <= 128 and text.isascii() and text.replace(".", "_").isidentifier()
