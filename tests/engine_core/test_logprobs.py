"""Log probabilities in OpenAI's two shapes."""

import math
from collections.abc import Sequence
from pathlib import Path

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob
from openai.types.completion_choice import Logprobs
from tiny_tokenizer import save_byte_tokenizer

from engine_core.fake_engine import ByteTokenizer
from engine_core.logprobs import ChatLogprobs, CompletionLogprobs
from engine_core.models import ModelFiles
from engine_core.tokenizer import Tokenizer
from engine_core.types import TokenLogprob


def tokens(text: str) -> list[TokenLogprob]:
    return [TokenLogprob(byte, -0.5, ((byte, -0.5), (65, -1.25))) for byte in text.encode()]


def test_chat_names_each_token_with_its_bytes_and_the_likeliest_ones() -> None:
    written = ChatLogprobs(ByteTokenizer()).write(tokens("a"))
    assert written["refusal"] is None
    (entry,) = written["content"]
    assert entry == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "A", "logprob": -1.25, "bytes": [65]},
        ],
    }
    ChatCompletionTokenLogprob.model_validate(entry, strict=True)


def test_a_part_of_a_character_is_spelled() -> None:
    content = ChatLogprobs(ByteTokenizer()).write(tokens("é"))["content"]
    assert [entry["token"] for entry in content] == ["\\xc3", "\\xa9"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é"
    assert CompletionLogprobs(ByteTokenizer()).write(tokens("é"))["tokens"] == [
        "bytes:\\xc3",
        "bytes:\\xa9",
    ]


def test_what_is_out_of_the_question_is_a_number_that_json_has() -> None:
    token = TokenLogprob(97, -math.inf, ((98, -math.inf),))
    (entry,) = ChatLogprobs(ByteTokenizer()).write([token])["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
    written = CompletionLogprobs(ByteTokenizer()).write([token])
    assert written["token_logprobs"] == [-9999.0]


def offsets(pieces: Sequence[str]) -> list[int]:
    logprobs = CompletionLogprobs(ByteTokenizer())
    return [at for piece in pieces for at in logprobs.write(tokens(piece))["text_offset"]]


def test_offsets_count_characters_from_piece_to_piece() -> None:
    assert offsets(["a", "éb", "", "🌍", "c"]) == [0, 1, 1, 2, 3, 3, 3, 3, 4]


def test_a_control_token_has_a_name_but_takes_no_room(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(ModelFiles("tiny", "tiny", tmp_path, "safetensors", "0"))
    ids = [*tokenizer.encode("a"), *tokenizer.eos_ids, *tokenizer.encode("b")]
    written = CompletionLogprobs(tokenizer).write([TokenLogprob(id_, -0.5) for id_ in ids])
    assert written["tokens"] == ["a", "<end>", "b"]
    assert written["text_offset"] == [0, 1, 1]


def test_the_drawn_token_is_always_among_the_top_of_a_completion() -> None:
    written = CompletionLogprobs(ByteTokenizer()).write([TokenLogprob(97, -3.0, ((65, -0.1),))])
    assert written["top_logprobs"] == [{"a": -3.0, "A": -0.1}]
    Logprobs.model_validate(written, strict=True)
