"""Matchers: which tokens they allow, whatever the tokenizer, and what they refuse."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from engine_core import grammar_compiler
from engine_core.errors import InvalidRequestError, OverloadedError
from engine_core.grammar import Grammar
from engine_core.grammar_compiler import GrammarCompiler, TokenMatcher
from engine_core.grammar_trial import Trial
from engine_core.models import ModelFiles
from engine_core.sampling import Sampler
from engine_core.tokenizer import Tokenizer
from engine_core.types import GenerationRequest, Sampling

PADDING = 7
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "anything": {},
    "values": {"enum": ["a", "bé", 3, None, {"k": [1, 2]}]},
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "number", "minimum": -9, "maximum": 9},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "formats": {
        "type": "array",
        "prefixItems": [
            {"type": "string", "format": name}
            for name in ("date-time", "date", "time", "ipv4", "ipv6", "uuid", "duration")
        ],
        "items": False,
        "minItems": 7,
    },
    "pattern": {
        "type": "array",
        "items": {"type": "string", "pattern": r"^[A-Z]{2,3}-\d{1,4}$"},
        "minItems": 2,
    },
    "multiples": {"type": "array", "items": {"type": "integer", "multipleOf": 7}, "minItems": 2},
    "either": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "array", "items": False}]},
    "one": {
        "oneOf": [
            {"properties": {"k": {"const": c}}, "required": ["k"], "additionalProperties": False}
            | {"type": "object"}
            for c in "ab"
        ]
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "patterns": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": False,
    },
    "both": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "string", "maxLength": 4}}, "required": ["b"]},
        ]
    },
    "names": {
        "type": "object",
        "properties": {"näme ☃ e\u0301": {"const": "“quoted” \\ 你好 <end>"}},
        "required": ["näme ☃ e\u0301"],
        "additionalProperties": False,
    },
}


def schema(name: str) -> Grammar:
    return Grammar("json_schema", json.dumps(SCHEMAS[name]))


def byte_level_core(normalizer: Any = None) -> tokenizers.Tokenizer:
    """Return a byte-level BPE of 400 tokens, many of them pieces of JSON."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if normalizer:
        core.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>", "<other end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((json.dumps(each) for each in SCHEMAS.values()), trainer)
    return core


def sentencepiece_core() -> tokenizers.Tokenizer:
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["▁", *letters, '▁"', '":', '{"', "name", "▁name"]
    names = ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", '"'), ('"', ":"), ("{", '"')]
    vocabulary = {name: id_ for id_, name in enumerate(names)}
    core = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens(["<unk>", "<end>"])
    return core


CORES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level_core,
    "normalising": lambda: byte_level_core(normalizers.NFC()),
    "sentencepiece": sentencepiece_core,
}


def tokenizer_of(core: tokenizers.Tokenizer, *ends: str) -> Tokenizer:
    ids = [core.token_to_id(end) for end in ends]
    return Tokenizer(core, bos_id=None, eos_ids=ids, template=None)


@pytest.fixture(scope="module", params=CORES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_of(CORES[request.param](), "<end>")


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return tokenizer_of(byte_level_core(), "<end>", "<other end>")


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream(continues=True)
    return "".join(stream.push(id_) for id_ in ids) + stream.flush()


def draw_text(tokenizer: Tokenizer, grammar: Grammar, seed: int, most: int = 600) -> str | None:
    """Draw tokens at random from those that are allowed; None if that finds no end.

    Half of the time something that closes is taken where it is allowed, for an end to come.
    """
    size = tokenizer.vocab_size + PADDING
    closing = [
        id_
        for id_ in range(tokenizer.vocab_size)
        if tokenizer.token_bytes(id_) in (b'"', b"]", b"}")
    ]
    matcher = tokenizer.matcher(grammar)
    random = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(most):
        allowed = matcher.allowed(size)
        assert allowed.any()
        assert not allowed[tokenizer.vocab_size :].any()
        ends = [id_ for id_ in tokenizer.eos_ids if allowed[id_]]
        assert len(ends) in (0, len(tokenizer.eos_ids))
        if ends and random.random() < 0.5:
            return text_of(tokenizer, ids)
        preferred = [id_ for id_ in closing if allowed[id_]]
        choice = preferred if preferred and random.random() < 0.5 else np.flatnonzero(allowed)
        token = int(random.choice(choice))
        if token in tokenizer.eos_ids:
            return text_of(tokenizer, ids)
        matcher.accept(token)
        ids.append(token)
    return None


def check(name: str, text: str) -> None:
    jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    ).validate(json.loads(text))


@pytest.mark.parametrize("name", SCHEMAS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_drawn_is_json_that_the_schema_validates(
    tokenizer: Tokenizer, name: str, seed: int
) -> None:
    if text := draw_text(tokenizer, schema(name), seed):
        check(name, text)


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_drawing_comes_to_an_end(tokenizer: Tokenizer, name: str) -> None:
    assert sum(draw_text(tokenizer, schema(name), seed) is not None for seed in range(20)) >= 10


def refused_at(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bytes | None:
    """Return the first of the text's own tokens that is not allowed; None if all are."""
    matcher = tokenizer.matcher(grammar)
    for id_ in tokenizer.encode(text):
        if not matcher.allowed(tokenizer.vocab_size)[id_]:
            return tokenizer.token_bytes(id_)
        matcher.accept(id_)
    allowed = matcher.allowed(tokenizer.vocab_size)
    return None if all(allowed[id_] for id_ in tokenizer.eos_ids) else b""


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - {"names"}))
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_a_valid_text_as_the_tokenizer_writes_it_is_allowed(
    byte_level: Tokenizer, name: str, seed: int
) -> None:
    if text := draw_text(byte_level, schema(name), seed):
        assert refused_at(byte_level, schema(name), text) is None


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_space_is_allowed_after_separators_and_nowhere_else(
    byte_level: Tokenizer, separators: tuple[str, str]
) -> None:
    text = json.dumps({"a": [1, {"b": None}], "c": ""}, separators=separators)
    assert refused_at(byte_level, Grammar("json_object"), text) is None
    for spaced in ('{ "a":1}', '{"a" :1}', '{"a":  1}', '{"a":1 }', '{"a":1,  "b":2}', '{"a":\n1}'):
        assert refused_at(byte_level, Grammar("json_object"), spaced) is not None


def test_only_an_end_of_turn_follows_a_complete_text(tokenizer: Tokenizer) -> None:
    matcher = tokenizer.matcher(Grammar("json_schema", '{"const": [1]}'))
    texts = []
    while not matcher.allowed(tokenizer.vocab_size)[sorted(tokenizer.eos_ids)].all():
        token = int(np.flatnonzero(matcher.allowed(tokenizer.vocab_size))[0])
        matcher.accept(token)
        texts.append(token)
    assert text_of(tokenizer, texts) == "[1]"
    assert set(np.flatnonzero(matcher.allowed(tokenizer.vocab_size))) == tokenizer.eos_ids


def test_lark_may_call_for_json(byte_level: Tokenizer) -> None:
    grammar = Grammar("lark", 'start: "<call>" %json {"type": "integer"} "</call>"')
    assert refused_at(byte_level, grammar, "<call>12</call>") is None
    assert refused_at(byte_level, grammar, "<call>x") == b"x"


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_the_sampler_draws_only_what_the_grammar_allows(
    byte_level: Tokenizer, temperature: float
) -> None:
    size = byte_level.vocab_size + PADDING
    request = GenerationRequest(
        id="r",
        prompt_ids=(1,),
        max_tokens=9,
        # A wish that the grammar overrules.
        sampling=Sampling(temperature=temperature, seed=5, logit_bias=((size - 1, 100.0),)),
        grammar=schema("values"),
        logprobs=1,
    )
    random = np.random.default_rng(3)
    for _ in range(20):
        sampler = Sampler(request, size, byte_level)
        ids: list[int] = []
        while not ids or ids[-1] not in byte_level.eos_ids:
            draw = sampler.draw(random.standard_normal(size).astype(np.float32))
            ids.append(draw.token)
            # The model's own view, which knows no grammar.
            assert draw.logprob
            assert draw.logprob.logprob <= draw.logprob.top[0][1]
        check("values", text_of(byte_level, ids[:-1]))


def test_two_sequences_do_not_disturb_each_other(byte_level: Tokenizer) -> None:
    first, second = (byte_level.matcher(schema("person")) for _ in range(2))
    before = second.allowed(byte_level.vocab_size)
    first.accept(byte_level.encode("{")[0])
    assert (second.allowed(byte_level.vocab_size) == before).all()


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the grammars that went through a trial; each takes 20 MiB."""
    tried: list[str] = []

    def try_grammar(source: str) -> Trial:
        tried.append(source)
        return Trial("", 20 * 1024**2)

    monkeypatch.setattr(grammar_compiler, "try_grammar", try_grammar)
    return tried


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_level_core(), [0])


def constant(number: int) -> Grammar:
    return Grammar("json_schema", json.dumps({"const": number}))


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler, trials: list[str]) -> None:
    for _ in range(3):
        compiler.matcher(constant(1))
    assert len(trials) == 1


def test_the_grammars_used_last_are_kept_as_far_as_memory_goes(
    compiler: GrammarCompiler, trials: list[str]
) -> None:
    for number in (1, 2, 3, 1, 4):  # three fit, and 2 was used longest ago
        compiler.matcher(constant(number))
    assert len(trials) == 4
    for number in (1, 3, 4):
        compiler.matcher(constant(number))
    assert len(trials) == 4
    compiler.matcher(constant(2))
    assert len(trials) == 5


def test_a_grammar_that_an_answer_follows_is_not_compiled_again(
    compiler: GrammarCompiler, trials: list[str]
) -> None:
    following = compiler.matcher(constant(0))
    for number in range(5):
        compiler.matcher(constant(number))
    compiler.matcher(constant(0))
    assert len(trials) == 5
    del following


def test_grammars_that_answers_follow_have_a_limit_in_all(
    compiler: GrammarCompiler, trials: list[str]
) -> None:
    following = [compiler.matcher(constant(number)) for number in range(12)]
    with pytest.raises(OverloadedError) as refusal:
        compiler.matcher(constant(12))
    assert (refusal.value.status, refusal.value.code) == (503, "memory_pressure")
    compiler.matcher(constant(0))
    following.clear()
    compiler.matcher(constant(12))
    assert len(trials) == 14


def test_any_json_needs_no_trial(compiler: GrammarCompiler, trials: list[str]) -> None:
    compiler.matcher(Grammar("json_object"))
    assert trials == []


def test_threads_may_ask_at_the_same_time(compiler: GrammarCompiler, trials: list[str]) -> None:
    made: list[TokenMatcher] = []
    threads = [
        threading.Thread(target=lambda i=i: made.append(compiler.matcher(constant(i % 3))))
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 12
    assert set(trials) == {constant(i).source() for i in range(3)}


def test_errors_name_the_field_and_what_is_not_supported(compiler: GrammarCompiler) -> None:
    grammar = Grammar("json_schema", '{"not": {}}', "tools[0].function.parameters")
    with pytest.raises(InvalidRequestError, match=r'Unimplemented keys: \["not"\]') as caught:
        compiler.matcher(grammar)
    assert caught.value.param == "tools[0].function.parameters"
    assert caught.value.status == 400


def test_a_schema_that_is_none_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="must be an object"):
        compiler.matcher(Grammar("json_schema", "[]"))


def test_a_grammar_that_takes_too_long_to_follow_ends_the_request(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = byte_level.matcher(schema("person"))
    now: Iterator[float] = iter(range(100))
    monkeypatch.setattr(grammar_compiler.time, "thread_time", lambda: next(now))
    matcher.allowed(byte_level.vocab_size)
    with pytest.raises(InvalidRequestError, match="too long to follow"):
        matcher.allowed(byte_level.vocab_size)


def test_a_grammar_with_too_many_readings_ends_the_request(byte_level: Tokenizer) -> None:
    names = [f"p{i}" for i in range(700)]  # all of them optional
    grammar = Grammar("json_schema", json.dumps({"properties": {name: {} for name in names}}))
    matcher = byte_level.matcher(grammar)
    with pytest.raises(InvalidRequestError, match=r"cannot be enforced: .*max is"):
        matcher.accept(byte_level.encode("{")[0])


@pytest.mark.parametrize(
    ("decoder", "ends", "lack"),
    [(decoders.WordPiece(), [0], "fixed text"), (decoders.ByteLevel(), [], "end-of-turn token")],
)
def test_tokenizers_that_cannot_do_it_say_so(decoder: Any, ends: list[int], lack: str) -> None:
    core = byte_level_core()
    core.decoder = decoder
    with pytest.raises(InvalidRequestError, match=lack) as caught:
        GrammarCompiler(core, ends).matcher(Grammar("json_object"))
    assert caught.value.code == "unsupported_parameter"


def test_the_bytes_of_all_tokens_make_up_the_text(tokenizer: Tokenizer) -> None:
    text = "Zoë 你好\n{}"
    spelled = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode()
    assert spelled.removeprefix(" ") == text
    assert tokenizer.token_bytes(tokenizer.vocab_size + 1) == b""
    assert b"<end>" in {tokenizer.token_bytes(id_) for id_ in tokenizer.eos_ids}


# --- The built-in model's tokenizer ----------------------------------------------------------

DOCUMENTS: dict[str, list[Any]] = {
    "person": [{"name": 'Zoë "你好"', "age": 42, "tags": ["a b", "x\\y", "\n"]}],
    "anything": ["It's 5 o'clock,  isn't it?", {"a": [1, 2.5e-3, {"b": None}]}, -7],
    "values": ["bé", {"k": [1, 2]}],
    "tree": [{"v": 1.5, "kids": [{"v": -2, "kids": []}, {"v": 0}]}],
    "pattern": [["AB-1", "XYZ-2024"]],
    "map": [{"one": 1, "two and more": 22}],
    "both": [{"a": 1, "b": "four", "c": [[]]}],
}


@pytest.fixture(scope="module")
def builtin(builtin_files: ModelFiles) -> Tokenizer:
    return Tokenizer.load(builtin_files)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_builtin_tokenizer_draws_only_what_validates(builtin: Tokenizer, name: str) -> None:
    texts = [draw_text(builtin, schema(name), seed) for seed in range(25)]
    found = [text for text in texts if text is not None]
    assert len(found) >= 12
    for text in found:
        check(name, text)
        if name != "names":  # which spells out a control token, and that is not how to write one
            assert refused_at(builtin, schema(name), text) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_the_builtin_tokenizer_may_write_each_document_its_own_way(
    builtin: Tokenizer, name: str, separators: tuple[str, str]
) -> None:
    for document in DOCUMENTS[name]:
        text = json.dumps(document, ensure_ascii=False, separators=separators)
        check(name, text)
        assert refused_at(builtin, schema(name), text) is None
