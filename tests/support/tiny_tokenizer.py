"""A tokenizer for tiny models: one token for each byte, and an end token."""

from pathlib import Path

BYTE_VOCABULARY = 257


def save_byte_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and its configuration; ids 0-255 are bytes, 256 is `<end>`."""
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    config = {"eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
