"""From one sequence's tokens to its text and the reason why it ends."""

from engine_core.stop import StopMatcher
from engine_core.types import ChatTokenizer, FinishReason, GenerationRequest, Usage

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What detokenisers give for bytes that are no whole character."""


class Answer:
    """What one request has been answered so far. Every engine ends its sequences through this.

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
        self.finish_reason: FinishReason | None = None
        """None while tokens may follow."""

    def push(self, token: int) -> str:
        """Take the next token; return the text that is certain now, perhaps none."""
        self._tokens += 1
        text = ""
        if token in self._eos_ids:
            self.finish_reason = "stop"
        else:
            text = self._stop.push(self._text.push(token))
            if self._tokens >= self._room:
                self.finish_reason = "length"
        if self.finish_reason:
            # A character that the limit has cut is left out: half of it is no text.
            text += self._stop.push(self._text.flush().rstrip(_BROKEN)) + self._stop.flush()
        if self._stop.matched:
            self.finish_reason = "stop"
        return text

    def usage(self) -> Usage:
        """Return the tokens so far; an end-of-turn token counts as generated."""
        return Usage(self._prompt_tokens, self._tokens)
