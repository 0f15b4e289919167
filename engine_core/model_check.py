"""Check model files on disk without loading them, and tell two sets of files apart."""

import hashlib
import json
from pathlib import Path
from typing import Any

from engine_core.errors import ModelError
from engine_core.gguf_file import read_gguf

RECORD = ".tidegate.json"
"""Written last into a fetched model's folder: commit, and the size in bytes of each file."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors library itself sets on its JSON header."""
_INDEX = "model.safetensors.index.json"


def check_gguf(path: Path) -> None:
    """Check that a GGUF file is there and whole.

    Raises:
        ModelError: says what is wrong and what to do.
    """
    if not path.is_file():
        raise ModelError(f"There is no file {path}.")
    read_gguf(path)


def check_folder(folder: Path) -> None:
    """Check that a folder is a whole safetensors model with a fast tokenizer.

    Raises:
        ModelError: says what is missing or cut off and what to do.
    """
    if not folder.is_dir():
        raise ModelError(f"There is no folder {folder}.")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder} has no {name}. A model folder needs config.json, tokenizer.json and "
                "*.safetensors; transformers' save_pretrained writes all of them."
            )
    weights = safetensors_files(folder)
    if not weights:
        raise ModelError(
            f"{folder} has no *.safetensors file. Weights in pickle files are not read, because "
            "loading them can run code; save the model again as safetensors."
        )
    for path in weights:
        _check_safetensors(path)


def safetensors_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: those its index names, else all of them."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map = read_json(index).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ModelError(f"{index} is damaged: it names no files. Download or copy it again.")
    names = set(weight_map.values())
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{index} names files outside its folder.")
    return sorted(folder / name for name in names)


def digest_of(path: Path) -> str:
    """Return an identity of local model files: it changes when one is replaced or edited.

    Names, sizes and modification times are hashed, not contents: those may be many gigabytes.
    """
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    facts = [(each.name, stat.st_size, stat.st_mtime_ns) for each in files if (stat := each.stat())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: not readable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.")
    return value


def _check_safetensors(path: Path) -> None:
    """Compare the length that the header promises with the length of the file.

    Format: https://huggingface.co/docs/safetensors/index#format
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _cut_off(path, size)
            header = json.loads(stream.read(length))
            end = max(
                (_tensor_end(info) for name, info in header.items() if name != "__metadata__"),
                default=0,
            )
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: its header is no safetensors header.") from error
    if 8 + length + end != size:
        raise _cut_off(path, size)


def _tensor_end(info: Any) -> int:
    begin, end = info["data_offsets"]
    numbers = [begin, end, *info["shape"]]
    if not isinstance(info["dtype"], str) or not all(
        isinstance(number, int) and number >= 0 for number in numbers
    ):
        raise TypeError("an entry of the header has a value of another type")
    return int(end)


def _cut_off(path: Path, size: int) -> ModelError:
    return ModelError(
        f"{path} is cut off or damaged ({size:,} bytes are not what its header says). "
        "Download or copy it again."
    )
