"""The built-in model with a chat template that offers tools, as a file of its own."""

from pathlib import Path

from tool_templates import HERMES_TEMPLATE

from engine_core.models import ModelFiles


def save_tool_model(builtin: ModelFiles, folder: Path) -> Path:
    """Write a GGUF file with the same weights and `HERMES_TEMPLATE`; return its path."""
    import gguf
    from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

    path = folder / "tool-model.gguf"
    reader = gguf.GGUFReader(builtin.path)
    writer = gguf.GGUFWriter(path, "llama")
    template = MetadataDetails(gguf.GGUFValueType.STRING, HERMES_TEMPLATE)
    copy_with_new_metadata(reader, writer, {"tokenizer.chat_template": template}, [])
    return path
