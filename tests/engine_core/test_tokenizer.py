"""Tokenizers built without transformers, against transformers; streams, against whole decoding."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tool_templates import HERMES_TEMPLATE

from engine_core.errors import InvalidRequestError, ModelError
from engine_core.gguf_file import read_gguf
from engine_core.gguf_tokenizer import gguf_tokenizer
from engine_core.models import ModelFiles
from engine_core.text_stream import stream_maker
from engine_core.tokenizer import Tokenizer
from engine_core.tool_calls import HERMES, PROBE_TOOL

CORPUS = [
    "The capital of France is Paris.",
    "中国的首都是哪里？北京是中华人民共和国的首都。",  # noqa: RUF001
    "Zoë's naïve café — “déjà vu”… ½ ² ①",
    "👩‍👩‍👧‍👦 🇨🇳 🏳️‍🌈 e\u0301 \u200d\ufeff",
    "def f(x):\n\treturn {'a': [1, 22, 333],\n            'b': x**2}\n\n\n",
    "   leading,  double   and trailing   ",
    "\r\n\r\n \n\t\t mixed\u00a0spaces\u3000here",
    "1 23 456 7890 3.14159 1,000,000 2024-01-31 ١٢٣ १२३",
    "I'll you're don't IT'S WE'VE",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "",
    "x" * 3000,
]

any_text = st.text(max_size=60)
# The built-in vocabulary lacks a few control characters and the lead bytes of planes 4 to 11, where
# Unicode has nothing; they vanish from a prompt, as under llama.cpp.
spellable_text = st.text(
    st.characters(
        max_codepoint=0x3FFFF,
        exclude_categories=["Cs"],
        exclude_characters="\x04\x06\x13\x14\x16\x1d",
    ),
    max_size=60,
)


@pytest.fixture(scope="module")
def builtin(builtin_files: ModelFiles) -> Tokenizer:
    return Tokenizer.load(builtin_files)


@pytest.fixture(scope="module")
def builtin_core(builtin_files: ModelFiles) -> tokenizers.Tokenizer:
    return gguf_tokenizer(read_gguf(builtin_files.path))


@pytest.fixture(scope="module")
def oracle(builtin_files: ModelFiles) -> Any:
    """Return transformers' tokenizer of the same file.

    Its converter leaves out the digit splitter of SmolLM2's own tokenizer.json, which shows only
    where several spaces stand before a digit; the oracle gets it back.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        str(builtin_files.path.parent), gguf_file=builtin_files.path.name
    )
    core = tokenizer.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), core.pre_tokenizer]
    )
    return tokenizer


@pytest.mark.slow
def test_builtin_ids_equal_those_of_transformers(builtin: Tokenizer, oracle: Any) -> None:
    for sample in CORPUS:
        assert builtin.encode(sample) == oracle.encode(sample, add_special_tokens=False), sample


@pytest.mark.slow
@given(text=spellable_text)
def test_builtin_ids_equal_those_of_transformers_on_any_text(
    builtin: Tokenizer, oracle: Any, text: str
) -> None:
    assert builtin.encode(text) == oracle.encode(text, add_special_tokens=False)


@pytest.mark.slow
def test_builtin_chat_ids_equal_those_of_transformers(builtin: Tokenizer, oracle: Any) -> None:
    messages = [
        {"role": "user", "content": "你好 <b>&</b>"},
        {"role": "assistant", "content": "Hello!\n"},
        {"role": "user", "content": "And now?"},
    ]

    assert builtin.encode_chat(messages) == oracle.apply_chat_template(
        messages, add_generation_prompt=True
    )


def test_builtin_facts(builtin: Tokenizer) -> None:
    assert builtin.vocab_size == 49152
    assert builtin.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert builtin.encode("Hi")[0] != 1  # the model wants no BOS


def test_half_a_surrogate_pair_is_the_clients_error(builtin: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        builtin.encode("a\ud800b")

    assert caught.value.param == "prompt"


def test_a_long_text_does_not_stop_other_threads(builtin: Tokenizer) -> None:
    began = threading.Event()
    worker = threading.Thread(target=lambda: (began.wait(), builtin.encode("1" * 300_000)))
    worker.start()
    began.set()
    pauses = 0
    while worker.is_alive():
        worker.join(0.001)
        pauses += 1
    assert pauses > 10  # it takes hundreds of milliseconds


def streamed(maker: Callable[[bool], Any], ids: list[int], *, continues: bool = False) -> str:
    stream = maker(continues)
    pieces = [stream.push(id_) for id_ in ids]
    pieces.append(stream.flush())
    return "".join(pieces)


@pytest.mark.parametrize("sample", CORPUS)
def test_the_stream_of_a_text_is_the_text(builtin_core: tokenizers.Tokenizer, sample: str) -> None:
    ids = builtin_core.encode(sample).ids

    assert streamed(stream_maker(builtin_core), ids) == builtin_core.decode(ids)


@given(text=any_text)
def test_the_stream_of_any_text_is_the_text(builtin_core: tokenizers.Tokenizer, text: str) -> None:
    ids = builtin_core.encode(text).ids

    assert streamed(stream_maker(builtin_core), ids) == builtin_core.decode(ids)


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_the_stream_of_any_ids_equals_their_whole_decoding(
    builtin_core: tokenizers.Tokenizer, ids: list[int]
) -> None:
    """Invalid UTF-8 too: both put one U+FFFD for each maximal invalid part."""
    assert streamed(stream_maker(builtin_core), ids) == builtin_core.decode(ids)


@given(text=spellable_text)
def test_no_piece_holds_a_broken_character(builtin: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    stream = builtin.stream()

    pieces = [stream.push(id_) for id_ in builtin.encode(text)]

    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.flush() == ""


def test_an_unfinished_character_is_flushed_as_a_replacement(builtin: Tokenizer) -> None:
    stream = builtin.stream()
    pieces = [stream.push(id_) for id_ in builtin.encode("🎉")[:-1]]

    assert "".join(pieces) == ""
    assert stream.flush() == "\ufffd"


def test_an_id_beyond_the_vocabulary_has_no_text(builtin: Tokenizer) -> None:
    assert builtin.stream().push(10**6) == ""


# --- SentencePiece -------------------------------------------------------------------------


def sentencepiece_vocab() -> dict[str, Any]:
    """Return a small Llama-2-like vocabulary as GGUF metadata."""
    words = ["▁", "e", "t", "h", "l", "o", "▁t", "he", "▁the", "ll", "▁he", "llo", "▁hello"]
    pieces = [*words, "中", "国"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    # A better score is a larger number: later tokens are joined later.
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture
def sentencepiece(write_gguf: Callable[..., Path]) -> Path:
    return write_gguf(sentencepiece_vocab())


def as_files(path: Path) -> ModelFiles:
    return ModelFiles(
        str(path), path.stem, path, "gguf" if path.is_file() else "safetensors", "digest"
    )


def tokens_of(core: tokenizers.Tokenizer, text: str) -> list[str]:
    tokens: list[str] = core.encode(text, add_special_tokens=False).tokens
    return tokens


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(sentencepiece: Path) -> None:
    core = gguf_tokenizer(read_gguf(sentencepiece))

    assert tokens_of(core, "the hello") == ["▁the", "▁hello"]
    assert tokens_of(core, "中é") == ["▁", "中", "<0xC3>", "<0xA9>"]


def test_sentencepiece_prompts_start_with_bos(sentencepiece: Path) -> None:
    assert Tokenizer.load(as_files(sentencepiece)).encode("the")[0] == 1


@pytest.mark.slow
def test_sentencepiece_ids_equal_those_of_transformers(sentencepiece: Path) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(sentencepiece.parent), gguf_file=sentencepiece.name)
    ours = gguf_tokenizer(read_gguf(sentencepiece))

    for sample in [*CORPUS[:-1], "hello the  hello", "thellothe", " hello", "</s>the<s>hello"]:
        theirs = oracle.encode(sample, add_special_tokens=False)
        assert ours.encode(sample, add_special_tokens=False).ids == theirs, sample


SPM_DECODER = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


def sentencepiece_core() -> tokenizers.Tokenizer:
    vocab = {token: id_ for id_, token in enumerate(sentencepiece_vocab()["tokenizer.ggml.tokens"])}
    core = tokenizers.Tokenizer(
        models.BPE(vocab, [("h", "e")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = SPM_DECODER
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return core


@given(text=any_text)
def test_the_stream_of_any_text_is_the_text_for_sentencepiece(text: str) -> None:
    core = sentencepiece_core()
    ids = core.encode(text).ids

    assert streamed(stream_maker(core), ids) == core.decode(ids)


def test_a_space_before_the_first_word_stays_where_a_text_is_continued() -> None:
    core = sentencepiece_core()
    ids = core.encode("hello").ids

    assert streamed(stream_maker(core), ids, continues=True) == " hello"
    assert streamed(stream_maker(core), ids) == "hello"


def test_an_invalid_byte_does_not_hold_back_what_follows() -> None:
    core = sentencepiece_core()
    stream = stream_maker(core)(False)

    pieces = [stream.push(core.token_to_id(token)) for token in ("<0xFF>", "e")]

    assert pieces == ["\ufffd", "e"]


def test_another_decoder_streams_too() -> None:
    core = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "wa": 1, "##ter": 2, "lily": 3}))
    core.decoder = decoders.WordPiece()
    core.add_special_tokens(["[UNK]"])

    assert streamed(stream_maker(core), [1, 2, 0, 3]) == "water lily"


def test_a_tokenizer_without_decoder_streams_words() -> None:
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))

    assert streamed(stream_maker(core), [0, 1]) == "a b"


def test_what_another_decoder_holds_back_is_flushed() -> None:
    core = byte_level_core()
    core.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])

    assert streamed(stream_maker(core), core.encode("aé").ids[:-1]) == "a\ufffd"


# --- Other vocabularies in GGUF --------------------------------------------------------------


def byte_level_vocab() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_core() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(
        models.BPE({token: id_ for id_, token in enumerate(byte_level_vocab())}, [])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


@pytest.mark.parametrize(
    ("pre", "digits", "accent"),
    [
        ("llama-bpe", ["123", "4"], "e\u0301"),
        ("qwen2", ["1", "2", "3", "4"], "é"),
        ("smollm", ["1", "2", "3", "4"], "e\u0301"),
        ("gpt-2", ["1234"], "e\u0301"),
    ],
)
def test_each_pre_tokenizer_splits_as_its_model_does(
    write_gguf: Callable[..., Path], pre: str, digits: list[str], accent: str
) -> None:
    vocab = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*byte_level_vocab(), "<|eot_id|>", "<调用 x>", "12"],
        "tokenizer.ggml.token_type": [*[1] * 256, 3, 4, 1],
        "tokenizer.ggml.merges": ["1 2"],
        "tokenizer.ggml.bos_token_id": 256,
    }
    path = write_gguf(vocab)
    core = gguf_tokenizer(read_gguf(path))

    words = [word for word, _ in core.pre_tokenizer.pre_tokenize_str("1234")]
    assert words == digits
    normal = core.normalizer.normalize_str("e\u0301") if core.normalizer else "e\u0301"
    assert normal == accent
    assert tokens_of(core, "a<|eot_id|><调用 x>") == ["a", "<|eot_id|>", "<调用 x>"]
    loaded = Tokenizer.load(as_files(path))
    assert loaded.eos_ids == {256}
    assert (loaded.encode("a")[0] == 256) is (pre == "llama-bpe")
    assert loaded.stream().push(257) == "<调用 x>"


@pytest.mark.parametrize(
    ("vocab", "reason"),
    [
        ({}, "no vocabulary"),
        ({"tokenizer.ggml.model": "t5"}, "kind 't5'"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "chatglm-bpe"}, "chatglm-bpe"),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a c"]}, "merges"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.eos_token_id": 99,
            },
            "eos token is outside",
        ),
        ({"tokenizer.ggml.model": 2}, "model is not a text"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": "a b"}, "merges is not texts"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.token_type": [0.5]}, "whole numbers"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.bos_token_id": "a"}, "a whole number"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.chat_template": 1}, "template is not a text"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused_with_the_reason(
    write_gguf: Callable[..., Path], vocab: dict[str, Any], reason: str
) -> None:
    if vocab:
        vocab = {**vocab, "tokenizer.ggml.tokens": ["a", "b"]}

    with pytest.raises(ModelError, match=reason):
        Tokenizer.load(as_files(write_gguf(vocab)))


def test_a_base_model_sends_chatters_to_completions(sentencepiece: Path) -> None:
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        Tokenizer.load(as_files(sentencepiece)).encode_chat([{"role": "user", "content": "Hi"}])


# --- Hugging Face folders ---------------------------------------------------------------------


def write_folder(folder: Path, *, post: bool = False, **files: dict[str, Any] | str) -> Path:
    core = byte_level_core()
    core.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<s>", "</s>", "<|im_end|>")]
    )
    core.enable_truncation(4)
    core.enable_padding(length=16)
    if post:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    core.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (folder / f"{name}.jinja").write_text(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("end", ["x", {"a": 1}, [5, "x"], 1.5])
def test_an_end_token_that_is_no_id_is_damage(tmp_path: Path, end: object) -> None:
    folder = write_folder(tmp_path, generation_config={"eos_token_id": end})
    with pytest.raises(ModelError, match="eos_token_id is no token id"):
        Tokenizer.load(as_files(folder))


@pytest.mark.parametrize("template", [3, [3], [{"name": "default"}], [{}]])
def test_a_chat_template_that_is_none_is_none(tmp_path: Path, template: object) -> None:
    folder = write_folder(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        Tokenizer.load(as_files(folder)).encode_chat([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("config", "post", "bos"),
    [
        ({"bos_token": "<s>"}, False, False),
        ({"bos_token": "<s>"}, True, True),
        ({"bos_token": "<s>", "add_bos_token": False}, True, False),
        ({"bos_token": {"content": "<s>"}, "add_bos_token": True}, False, True),
        ({"bos_token": None, "add_bos_token": True}, False, False),
    ],
)
def test_bos_is_added_when_the_folder_says_so(
    tmp_path: Path, config: dict[str, Any], post: bool, bos: bool
) -> None:
    tokenizer = Tokenizer.load(as_files(write_folder(tmp_path, post=post, tokenizer_config=config)))

    assert (tokenizer.encode("a")[0] == 256) is bos


def test_the_tokenizers_own_truncation_and_padding_are_off(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(as_files(write_folder(tmp_path)))

    assert [len(tokenizer.encode(sample)) for sample in ("a", "a" * 40)] == [1, 40]


def test_end_tokens_come_from_every_file(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        generation_config={"eos_token_id": [5, 6]},
        config={"eos_token_id": 7},
        special_tokens_map={"eos_token": "a"},
    )
    core = byte_level_core()

    # </s> and <|im_end|> end a turn wherever they exist.
    expected = {5, 6, 7, core.token_to_id("a"), 257, 258}
    assert Tokenizer.load(as_files(folder)).eos_ids == expected


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"bos_token": "<s>", "chat_template": TEMPLATE}},
        {
            "tokenizer_config": {
                "bos_token": "<s>",
                "chat_template": [
                    {"name": "rag", "template": "no"},
                    {"name": "default", "template": TEMPLATE},
                ],
            }
        },
        {
            "tokenizer_config": {"bos_token": "<s>", "chat_template": "older"},
            "chat_template": TEMPLATE,
        },
    ],
)
def test_the_chat_template_is_found_where_models_keep_it(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    tokenizer = Tokenizer.load(as_files(write_folder(tmp_path, **files)))

    ids = tokenizer.encode_chat([{"role": "user", "content": "ab"}])

    assert ids == [256, *tokenizer.encode("ab")]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path)
    (folder / name).write_bytes(b'{"version": \xff')

    with pytest.raises(ModelError, match=name):
        Tokenizer.load(as_files(folder))


@pytest.mark.parametrize(
    "where",
    [
        {"additional_chat_templates/tool_use": HERMES_TEMPLATE},
        {
            "tokenizer_config": {
                "chat_template": [
                    {"name": "default", "template": TEMPLATE},
                    {"name": "tool_use", "template": HERMES_TEMPLATE},
                ]
            }
        },
    ],
)
def test_conversations_with_tools_may_have_a_template_of_their_own(
    tmp_path: Path, where: dict[str, Any]
) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    files: dict[str, Any] = {"tokenizer_config": {"chat_template": TEMPLATE}} | where
    tokenizer = Tokenizer.load(as_files(write_folder(tmp_path, **files)))
    user = {"role": "user", "content": "ab"}
    result = {"role": "tool", "content": "ab"}

    assert tokenizer.tool_format is HERMES
    plain = tokenizer.encode_chat([user])
    assert plain != tokenizer.encode_chat([user], [PROBE_TOOL])
    assert "<|im_start|>tool" in text_of(tokenizer, tokenizer.encode_chat([user, result]))
    assert "<|im_start|>" not in text_of(tokenizer, plain)


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join(stream.push(id_) for id_ in ids)


def test_a_model_without_a_template_has_no_tools(tmp_path: Path) -> None:
    assert Tokenizer.load(as_files(write_folder(tmp_path))).tool_format is None


def test_marks_of_tool_calls_are_text_even_where_they_are_control_tokens(tmp_path: Path) -> None:
    core = byte_level_core()
    marks = [AddedToken(token, special=True) for token in ("[TOOL_CALLS]", "<tool_call>", "<pad>")]
    core.add_special_tokens(marks)
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(as_files(tmp_path))

    text = "[TOOL_CALLS] [1]<pad> <tool_call>"
    assert text_of(tokenizer, tokenizer.encode(text)) == "[TOOL_CALLS] [1] <tool_call>"


def test_a_gguf_file_may_hold_a_template_for_tools(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": ["a", "b", "ab"],
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.chat_template": TEMPLATE,
            "tokenizer.chat_template.tool_use": HERMES_TEMPLATE,
        }
    )

    assert Tokenizer.load(as_files(path)).tool_format is HERMES
