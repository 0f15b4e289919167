"""What tests in every room share."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from engine_core.models import BUILTIN, ModelFiles, ModelStore

# A shared machine may hold a test up for longer than the 200 ms that hypothesis allows an example.
settings.register_profile("tidegate", deadline=None)
settings.load_profile("tidegate")

LLAMA_SHAPE: dict[str, Any] = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.freq_base": 500000.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.fixture(scope="session")
def builtin_files() -> ModelFiles:
    """Return the built-in model, fetched into the user's cache if it is not there yet."""
    return ModelStore().pull(BUILTIN)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Return what writes a small GGUF file, by the `gguf` package, and returns its path.

    `metadata` comes on top of a tiny Llama shape; None as a value leaves that key out. Integers
    are written as uint32. Without `tensors` there is an embedding of 32 tokens.
    """

    def write(
        metadata: Mapping[str, Any] = {},
        *,
        architecture: str = "llama",
        tensors: Mapping[str, Any] | None = None,
        name: str = "m.gguf",
    ) -> Path:
        import gguf

        shape = {f"{architecture}.{key}": value for key, value in LLAMA_SHAPE.items()}
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        for key, value in {**shape, **metadata}.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif value is not None:
                writer.add_array(key, value)
        if tensors is None:
            tensors = {"token_embd.weight": np.zeros((32, 64), np.float32)}
        for tensor_name, tensor in tensors.items():
            writer.add_tensor(tensor_name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write
