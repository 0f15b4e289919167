"""Text to token ids and back, for every model format, without transformers."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine_core.chat_template import ChatTemplate
from engine_core.errors import InvalidRequestError, ModelError
from engine_core.gguf_file import GgufFile, read_gguf
from engine_core.gguf_tokenizer import gguf_tokenizer, wants_bos
from engine_core.grammar import Grammar
from engine_core.grammar_compiler import GrammarCompiler, TokenMatcher
from engine_core.model_check import read_json
from engine_core.models import ModelFiles
from engine_core.text_stream import spelling, stream_maker
from engine_core.tool_calls import ToolFormat
from engine_core.types import TextStream

END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<EOT>",
    "</s>",
)
"""Control tokens that end a turn in every model that has them; llama.cpp keeps the same list.

Model files often name only one of their end tokens, and then an answer would run on.
"""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """One model's tokenizer and chat template. Safe to use from several threads.

    Args:
        core: The tokenizer proper.
        bos_id: Token that starts a plain prompt, or None.
        eos_ids: Tokens that the model files say end a turn; those of `END_OF_TURN` are added.
        template: The chat template, or None for a base model.
        tool_template: The template for conversations with tools, where that is another one.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        core.no_truncation()
        core.no_padding()
        special = {
            token.content: id_
            for id_, token in core.get_added_tokens_decoder().items()
            if token.special
        }
        self._core = core
        self._bos_id = bos_id
        self._template = template
        self._tool_template = tool_template or template
        self._new_stream = stream_maker(core)
        self._to_bytes = spelling(core)
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)
        self.eos_ids: frozenset[int] = frozenset(eos_ids) | {
            special[token] for token in END_OF_TURN if token in special
        }
        self._grammars = GrammarCompiler(core, self.eos_ids)

    @classmethod
    def load(cls, files: ModelFiles) -> "Tokenizer":
        """Read the tokenizer of a model.

        Raises:
            ModelError: there is none, or it is of a kind that cannot be read.
        """
        if files.format == "gguf":
            return _from_gguf(read_gguf(files.path))
        return _from_folder(files.path)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, with BOS in front if the model wants it.

        Raises:
            InvalidRequestError: the text holds half a surrogate pair.
        """
        ids = self._ids(text, param="prompt")
        return ids if self._bos_id is None else [self._bos_id, *ids]

    @property
    def follows_grammars(self) -> bool:
        """Whether answers can be held to a grammar; see `ChatTokenizer.matcher`."""
        return self._to_bytes is not None and bool(self.eos_ids)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; see `ChatTokenizer.tool_format`."""
        return self._tool_template.tool_format if self._tool_template else None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation, ending where the assistant is to go on.

        Control tokens spelled out in a message count as control tokens, as in transformers: the
        client owns the whole conversation and can hurt only its own answer.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        with_tools = tools or any(turn["role"] == "tool" for turn in messages)
        template = self._tool_template if with_tools else self._template
        if template is None:
            raise InvalidRequestError(
                "This model has no chat template, so it cannot chat; use /v1/completions.",
                code="chat_template_missing",
            )
        return self._ids(template.render(messages, tools), param="messages")

    def stream(self, *, continues: bool = False) -> TextStream:
        """Return a detokeniser for one generated sequence; see `ChatTokenizer.stream`."""
        return self._new_stream(continues)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token stands for in a text, or the name of a control token."""
        name: str | None = self._core.id_to_token(token_id)
        if name is None:  # models pad their vocabulary
            return b""
        if self._to_bytes is None:
            text: str = self._core.decode([token_id], skip_special_tokens=False)
            return text.encode()
        return self._to_bytes(name)

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        """Return what holds one answer to a grammar; see `ChatTokenizer.matcher`."""
        return self._grammars.matcher(grammar)

    def _ids(self, text: str, *, param: str) -> list[int]:
        try:
            # Unlike `encode`, which would stop every other thread for seconds with long texts.
            batch = self._core.encode_batch_fast([text], add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequestError(
                "The text holds half of a surrogate pair, which is no character.", param=param
            ) from None
        ids: list[int] = batch[0].ids
        return ids


def _from_gguf(file: GgufFile) -> Tokenizer:
    core = gguf_tokenizer(file)
    metadata, tokens = file.metadata, file.metadata["tokenizer.ggml.tokens"]
    ids = {
        name: metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    for name, id_ in ids.items():
        if id_ is not None and not 0 <= id_ < len(tokens):
            raise ModelError(f"{file.path}: its {name} token is outside the vocabulary.")
    variables = {
        f"{short}_token": tokens[id_]
        for short, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (id_ := ids[name]) is not None
    }
    source = metadata.get("tokenizer.chat_template")
    tool_source = metadata.get("tokenizer.chat_template.tool_use")
    return Tokenizer(
        core,
        bos_id=ids["bos"] if wants_bos(file) else None,
        eos_ids=[id_ for name in ("eos", "eot", "eom") if (id_ := ids[name]) is not None],
        template=ChatTemplate(source, variables) if source else None,
        tool_template=ChatTemplate(tool_source, variables) if tool_source else None,
    )


def _from_folder(folder: Path) -> Tokenizer:
    try:
        core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception for everything
        raise ModelError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    config = _json(folder / "tokenizer_config.json")
    named = {
        name: text
        for name in _NAMED_TOKENS
        if (
            text := _token_text(
                config.get(name, _json(folder / "special_tokens_map.json").get(name))
            )
        )
    }
    source = _template_source(folder, "chat_template.jinja", config, "default")
    tool_source = _template_source(
        folder, "additional_chat_templates/tool_use.jinja", config, "tool_use"
    )
    return Tokenizer(
        core,
        bos_id=_bos_id(core, config, named.get("bos_token")),
        eos_ids=_eos_ids(core, folder, named.get("eos_token")),
        template=ChatTemplate(source, named) if source else None,
        tool_template=ChatTemplate(tool_source, named) if tool_source else None,
    )


def _bos_id(
    core: tokenizers.Tokenizer, config: Mapping[str, Any], bos_token: str | None
) -> int | None:
    """Return BOS if the files say that a prompt starts with it.

    `add_bos_token` decides where it is given; else what the tokenizer itself adds to a text.
    """
    bos_id: int | None = core.token_to_id(bos_token) if bos_token else None
    if bos_id is None:
        return None
    wanted = config.get("add_bos_token")
    if wanted is None:
        wanted = bos_id in core.encode("", add_special_tokens=True).ids
    return bos_id if wanted else None


def _eos_ids(core: tokenizers.Tokenizer, folder: Path, eos_token: str | None) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(id_, int) for id_ in ids):
            raise ModelError(f"{folder / name} is damaged: its eos_token_id is no token id.")
        found.update(ids)
    if eos_token and (id_ := core.token_to_id(eos_token)) is not None:
        found.add(id_)
    return found


def _template_source(folder: Path, file: str, config: Mapping[str, Any], name: str) -> str | None:
    """Return a template out of a file of its own, or the one of a name in the configuration."""
    try:
        return (folder / file).read_text(encoding="utf-8")
    except FileNotFoundError:
        sources = config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder / file} cannot be read: {error}") from error
    if not isinstance(sources, list):  # the only one
        sources = [{"name": "default", "template": sources}]
    named = (each for each in sources if isinstance(each, dict) and each.get("name") == name)
    source = next((each.get("template") for each in named), None)
    return source if isinstance(source, str) else None


def _token_text(token: Any) -> str | None:
    """Return the text of a token that is written as text or as an `AddedToken` dictionary."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
