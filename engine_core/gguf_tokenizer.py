"""Build a `tokenizers.Tokenizer` from the vocabulary inside a GGUF file, without transformers.

Two kinds of vocabulary exist in Llama-shaped models: byte-level BPE (GGUF calls it `gpt2`) and
SentencePiece BPE with byte fallback (GGUF calls it `llama`). GGUF stores no pre-tokenizer, only its
name; the regular expressions belong to the models' own `tokenizer.json` files.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from engine_core.errors import ModelError
from engine_core.gguf_file import GgufFile

CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of tokens that are never text, such as `<|im_end|>`."""
_UNKNOWN_TOKEN, _USER_DEFINED_TOKEN = 2, 4

_KINDS: dict[str, tuple[str, type, bool]] = {
    "tokenizer.ggml.model": ("a text", str, False),
    "tokenizer.ggml.pre": ("a text", str, False),
    "tokenizer.chat_template": ("a text", str, False),
    "tokenizer.chat_template.tool_use": ("a text", str, False),
    "tokenizer.ggml.tokens": ("texts", str, True),
    "tokenizer.ggml.merges": ("texts", str, True),
    "tokenizer.ggml.scores": ("numbers", float, True),
    "tokenizer.ggml.token_type": ("whole numbers", int, True),
    **{
        f"tokenizer.ggml.{name}_token_id": ("a whole number", int, False)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    },
}
"""What the file says about its tokenizer: in words, the type, and whether it is a list."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _words(r"\p{N}{1,3}"),
    "qwen2": lambda: _words(r"\p{N}"),
}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        ModelError: no vocabulary, metadata of a wrong type, or a kind that is not supported.
    """
    _check_kinds(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.path} has no vocabulary; take a GGUF file with its tokenizer.")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens)
    else:
        raise ModelError(
            f"{file.path} has a tokenizer of kind {kind!r}; only 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE) can be read. Use the model's safetensors folder instead."
        )
    types = file.metadata.get("tokenizer.ggml.token_type") or []
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, type_ in zip(tokens, types, strict=False)
            if type_ in (CONTROL_TOKEN, _UNKNOWN_TOKEN)
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, type_ in zip(tokens, types, strict=False)
            if type_ == _USER_DEFINED_TOKEN
        ]
    )
    return tokenizer


def _check_kinds(file: GgufFile) -> None:
    for key, (words, kind, is_list) in _KINDS.items():
        if (value := file.metadata.get(key)) is None:
            continue
        # All items of a list have one type, so the first speaks for them.
        sample = value[:1] if is_list and isinstance(value, list) else [value]
        if isinstance(value, list) != is_list or not all(isinstance(item, kind) for item in sample):
            raise ModelError(
                f"{file.path} is damaged: {key} is not {words}. Download or copy it again."
            )


def wants_bos(file: GgufFile) -> bool:
    """Return whether a plain prompt starts with the BOS token.

    Where the file does not say, llama.cpp's defaults hold: yes for SentencePiece and Llama 3.
    """
    default = (
        file.metadata.get("tokenizer.ggml.model") == "llama"
        or file.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", default))


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path} splits text the way {name!r} does, which is not known here (known: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}). Use the model's safetensors folder instead."
        )
    merges = [
        (left, right)
        for left, _, right in (
            line.partition(" ") for line in file.metadata.get("tokenizer.ggml.merges", [])
        )
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a whole word that is in the vocabulary as it is, without replaying merges.
    tokenizer = _bpe(file, vocab, merges, ignore_merges=name == "llama-bpe")
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    metadata = file.metadata
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(tokens):
        raise ModelError(f"{file.path}: its unknown token is outside the vocabulary.")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, metadata.get("tokenizer.ggml.scores", []))
    tokenizer = _bpe(
        file, vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _bpe(
    file: GgufFile, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:  # tokenizers raises bare Exception for everything
        raise ModelError(
            f"{file.path} is damaged: its merges do not fit its vocabulary ({error})."
        ) from error


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Rebuild the merge list: SentencePiece joins the pair whose whole has the best score."""
    if len(scores) < len(vocab):
        raise ModelError("The GGUF file's vocabulary has no scores; its tokenizer cannot be built.")
    merges = []
    for token, index in vocab.items():
        halves = sorted(
            (vocab[token[:cut]], vocab[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        )
        merges += [(scores[index], token[:cut], token[cut:]) for _, _, cut in halves]
    # A stable sort keeps the order of equal scores: that of the vocabulary.
    merges.sort(key=itemgetter(0), reverse=True)
    return [(left, right) for _, left, right in merges]
