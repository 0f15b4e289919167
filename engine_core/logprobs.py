"""Log probabilities in OpenAI's two shapes, for chat and for plain completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from engine_core.types import ChatTokenizer, TokenLogprob

_LEAST = -9999.0
"""What OpenAI says for a token that is out of the question; JSON has no infinity."""


class ChatLogprobs:
    """`choices[].logprobs` of a chat answer.

    Args:
        tokenizer: Of the model that answers.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._bytes = tokenizer.token_bytes

    def write(self, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return the JSON of some tokens."""
        content = [
            {
                **self._entry(token.token, token.logprob),
                "top_logprobs": [self._entry(id_, logprob) for id_, logprob in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, id_: int, logprob: float) -> dict[str, Any]:
        raw = self._bytes(id_)
        return {
            "token": _spelled(raw, ""),
            "logprob": max(logprob, _LEAST),
            "bytes": list(raw),
        }


class CompletionLogprobs:
    """`choices[].logprobs` of a plain completion.

    Offsets count the characters of the answer, which go on from piece to piece. A token that begins
    in the middle of a character has the offset of that character.

    Args:
        tokenizer: Of the model that answers.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        # Not from the bytes: control tokens have a name, but no text.
        self._text = tokenizer.stream(continues=True)
        self._offset = 0

    def write(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the JSON of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._text.push(token.token))
        return {
            "tokens": [self._name(token.token) for token in tokens],
            "token_logprobs": [max(token.logprob, _LEAST) for token in tokens],
            # The drawn token is always among them, as OpenAI has it.
            "top_logprobs": [
                {
                    self._name(id_): max(logprob, _LEAST)
                    for id_, logprob in ((token.token, token.logprob), *token.top)
                }
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _name(self, id_: int) -> str:
        return _spelled(self._bytes(id_), "bytes:")


def _spelled(raw: bytes, mark: str) -> str:
    """Return a token's text; what is no whole character is spelled in hexadecimal, as OpenAI does."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in raw)
