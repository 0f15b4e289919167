"""Turn generated token ids into text piece by piece, never splitting a character.

`tokenizers.DecodeStream` does most of this, but it holds everything back behind one invalid byte,
slows down while it does, and cannot say what is left at the end. For the two decoders that
Llama-shaped models use, the bytes of each token are known on their own, so an incremental UTF-8
decoder is exact and takes constant time per token. Any other decoder goes through `DecodeStream`.
"""

import codecs
import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from engine_core.tool_calls import TOOL_MARKS
from engine_core.types import TextStream

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def stream_maker(tokenizer: tokenizers.Tokenizer) -> Callable[[bool], TextStream]:
    """Return what makes a new stream for this tokenizer, by the kind of its decoder.

    The maker's argument says whether the stream continues a text instead of beginning one: then
    SentencePiece's leading space is a space. Tokens of `silent_ids` have no text in a stream.
    """
    to_bytes = spelling(tokenizer)
    if to_bytes is None:
        return lambda _: _AnyStream(tokenizer)
    silent = silent_ids(tokenizer)
    strips = any(step["type"] == "Strip" for step in _decoder_steps(tokenizer))
    return lambda continues: _ByteStream(
        tokenizer, silent, to_bytes, strip=strips and not continues
    )


def silent_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """Return the special tokens, which are never text, except for those that mark tool calls."""
    return frozenset(
        id_
        for id_, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content not in TOOL_MARKS
    )


def spelling(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes] | None:
    """Return what gives a token's bytes by its name in the vocabulary.

    None where the bytes of a token depend on its neighbours.
    """
    steps = _decoder_steps(tokenizer)
    names = {step["type"] for step in steps}
    if names == {"ByteLevel"}:
        return _byte_level_bytes
    if names - {"Strip"} == {"ByteFallback", "Fuse", "Replace"} and _is_metaspace(steps):
        return _sentencepiece_bytes
    return None


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _is_metaspace(steps: list[dict[str, Any]]) -> bool:
    """Return whether the decoder is SentencePiece's: `▁` is a space, one leading space goes."""
    expected: dict[str, dict[str, Any]] = {
        "Replace": {"pattern": {"String": "▁"}, "content": " "},
        "Strip": {"content": " ", "start": 1, "stop": 0},
    }
    return all(
        step.get(key) == value
        for step in steps
        for key, value in expected.get(step["type"], {}).items()
    )


class _ByteStream:
    """For decoders under which each token is a fixed run of bytes."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        silent: frozenset[int],
        to_bytes: Callable[[str], bytes],
        *,
        strip: bool,
    ) -> None:
        self._token = tokenizer.id_to_token
        self._silent = silent
        self._to_bytes = to_bytes
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._silent:
            return ""
        # Models pad their vocabulary; an id behind the tokenizer's last one has no text.
        token = self._token(token_id)
        return "" if token is None else self._emit(self._utf8.decode(self._to_bytes(token)))

    def flush(self) -> str:
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _AnyStream:
    """For every other decoder, by way of `tokenizers`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text: str | None = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        held, self._held = self._held, []
        text: str = self._tokenizer.decode(held, skip_special_tokens=True)
        return text


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's reversible map: each byte is written as one printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_characters()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token is plain text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace("▁", " ").encode()
