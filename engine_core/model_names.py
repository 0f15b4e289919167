"""What a model's name means, without looking for the model."""

import re
from pathlib import Path

from engine_core.builtin_model import BUILTIN, BUILTIN_LABEL
from engine_core.errors import ModelError

_PART = r"[A-Za-z0-9][\w.-]*"
_HUB_NAME = re.compile(rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>{_PART}(?:/{_PART})*))?")
_LOCAL_START = ("/", "./", "../", "~")


def is_local(name: str, folder: Path = Path()) -> bool:
    """Return whether a model's name means a file or folder of the person's own.

    Args:
        name: Any of the four forms, or none of them.
        folder: What a relative path is relative to.
    """
    if name.startswith("builtin:"):
        return False
    return (
        name.startswith(_LOCAL_START)
        or name.endswith(".gguf")
        or (name != "" and _is_folder(folder / name))
    )


def local_path(name: str, folder: Path = Path()) -> Path:
    """Return the path that a local name means; whether anything is there is not looked at.

    Raises:
        ModelError: it starts in the home of a user whom this machine lacks.
    """
    try:
        return folder / Path(name).expanduser()
    except RuntimeError:
        raise ModelError(f"{name} starts in the home of a user whom this machine lacks.") from None


def name_fault(name: str) -> str | None:
    """Return why a name that is not local names no model either, or None."""
    if name == BUILTIN or _HUB_NAME.fullmatch(name):
        return None
    if name == BUILTIN_LABEL:
        return f"the built-in model is called {BUILTIN}"
    return (
        f"{name!r} is not a model's name. It can be {BUILTIN}, a Hugging Face name such as "
        "organisation/model or organisation/model@revision, a folder with config.json and "
        "safetensors, or a .gguf file"
    )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # longer than a name can be, or where this user may not look
        return False
