"""From one sequence's tokens to its text and the reason why it ends."""

from collections import deque
from dataclasses import dataclass

from engine_core.stop import StopMatcher
from engine_core.types import (
    ChatTokenizer,
    FinishReason,
    GenerationRequest,
    TextEvent,
    TokenLogprob,
    Usage,
)

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What detokenisers give for bytes that are no whole character."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The next token of a sequence, and how likely it was if the request wants to know."""

    token: int
    logprob: TokenLogprob | None = None


class Answer:
    """What one request has been answered so far. Every engine ends its sequences through this.

    A token's log probability goes out with the first of the token's characters that does. So one
    whose text waits for the rest of a character, or might belong to a stop string, waits with it,
    and one whose text is never said (cut by a stop string, or a control token at the end) is not
    reported, as in OpenAI's API.

    Args:
        request: The request that is answered.
        tokenizer: Of the model that answers.
        context_window: Of the engine, in tokens; the answer ends when the sequence fills it.
    """

    def __init__(
        self, request: GenerationRequest, tokenizer: ChatTokenizer, context_window: int
    ) -> None:
        self._prompt_tokens = len(request.prompt_ids)
        self._room = min(request.max_tokens, context_window - self._prompt_tokens)
        self._eos_ids = tokenizer.eos_ids
        self._text = tokenizer.stream(continues=request.continues)
        self._stop = StopMatcher(request.stop)
        self._tokens = 0
        # Counted in characters: the text of all tokens, and the part of it that went out.
        self._decoded = 0
        self._released = 0
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()  # with where their text begins
        self.finish_reason: FinishReason | None = None
        """None while tokens may follow."""

    def push(self, draw: Draw) -> TextEvent | None:
        """Take the next token; return the text that is certain now, if there is any."""
        self._tokens += 1
        if draw.logprob:
            self._logprobs.append((self._decoded, draw.logprob))
        text = ""
        if draw.token in self._eos_ids:
            self.finish_reason = "stop"
        else:
            text = self._released_by(self._text.push(draw.token))
            if self._tokens >= self._room:
                self.finish_reason = "length"
        if self.finish_reason:
            # A character that the limit has cut is left out: half of it is no text.
            text += self._released_by(self._text.flush().rstrip(_BROKEN)) + self._stop.flush()
        if self._stop.matched:
            self.finish_reason = "stop"
        if not text:
            return None
        self._released += len(text)
        return TextEvent(text, tuple(self._begun()))

    def usage(self, cached_tokens: int = 0) -> Usage:
        """Return the tokens so far; an end-of-turn token counts as generated.

        Args:
            cached_tokens: How many of the prompt did not have to be computed.
        """
        return Usage(self._prompt_tokens, self._tokens, cached_tokens)

    def _released_by(self, text: str) -> str:
        """Take decoded text; return what can no longer belong to a stop string."""
        self._decoded += len(text)
        return self._stop.push(text)

    def _begun(self) -> list[TokenLogprob]:
        """Take out the tokens of which a character went out."""
        begun = []
        while self._logprobs and self._logprobs[0][0] < self._released:
            begun.append(self._logprobs.popleft()[1])
        return begun
