"""Fetch a model from the Hugging Face hub into a plain folder, whole and verified or not at all."""

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars

from engine_core.downloads import check_room, full_disk, is_full_disk, replace_durably, say
from engine_core.errors import ModelError
from engine_core.model_check import RECORD

_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates/tool_use.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
)
_UNWANTED = ("consolidated*",)
"""Mistral's second copy of the same weights, in its own naming."""
_TIMEOUT_SECONDS = 30
_CHUNK = 1 << 20


def fetch_hub(
    repository: str, revision: str | None, target: Path, partial: Path, *, progress: bool
) -> None:
    """Put a model at `target`.

    What an interrupted download has left in `partial` is used. After an error of the network it
    stays there; after any other it is removed.

    Args:
        repository: `organisation/name`.
        revision: Branch, tag or commit; None is the default branch.
        target: Folder to make.
        partial: Folder to work in, on the same disk.
        progress: Whether to report on stderr.

    Raises:
        ModelError: the model cannot be had; says why and what to do.
    """
    if not (progress and sys.stderr.isatty()):
        disable_progress_bars()
    try:
        info = HfApi().model_info(
            repository, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
        )
        files = _wanted(repository, info.siblings or [])
        needed = sum(file.size or 0 for file in files)
        partial.mkdir(parents=True, exist_ok=True)
        check_room(partial, needed - _bytes_in(partial))
        if progress:
            say(f"Downloading {repository} ({needed / 1e6:,.0f} MB)")
        snapshot_download(
            repository,
            revision=info.sha,
            local_dir=partial,
            allow_patterns=[file.rfilename for file in files],
        )
        for file in files:
            _verify(partial / file.rfilename, file)
        _finish(partial, target, str(info.sha), files)
    except ModelError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    # huggingface_hub 0.x raises requests' errors and 1.x httpx's, so no narrower type holds.
    except Exception as error:
        if is_full_disk(error):
            shutil.rmtree(partial, ignore_errors=True)
            raise full_disk(partial.parent, needed) from error
        raise _explain(repository, revision, error) from error


def _wanted(repository: str, siblings: Sequence[Any]) -> list[Any]:
    files = [
        file
        for file in siblings
        if "/" not in file.rfilename
        and any(fnmatch(file.rfilename, pattern) for pattern in _PATTERNS)
        and not any(fnmatch(file.rfilename, pattern) for pattern in _UNWANTED)
    ]
    names = {file.rfilename for file in files}
    for name in ("config.json", "tokenizer.json"):
        if name not in names:
            raise ModelError(f"{repository} has no {name}; it cannot be served from here.")
    if not any(name.endswith(".safetensors") for name in names):
        raise ModelError(
            f"{repository} has no *.safetensors. If it offers GGUF files, download one and give "
            "its path as the model."
        )
    return files


def _verify(path: Path, file: Any) -> None:
    """Check size, and the sha256 that the hub keeps for large files."""
    good = path.is_file() and file.size in (None, path.stat().st_size)
    if good and file.lfs is not None:
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        good = digest.hexdigest() == file.lfs.sha256
    if not good:
        raise ModelError(
            f"{file.rfilename} did not arrive as the hub describes it, and has been thrown away. "
            "Pull again; if it happens again, something between here and the hub changes it."
        )


def _finish(partial: Path, target: Path, commit: str, files: Sequence[Any]) -> None:
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    record = {
        "commit": commit,
        "files": {file.rfilename: (partial / file.rfilename).stat().st_size for file in files},
    }
    (partial / RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    replace_durably(partial, target)


def _explain(repository: str, revision: str | None, error: Exception) -> ModelError:
    if isinstance(error, GatedRepoError):
        return ModelError(
            f"{repository} is gated: accept its terms on its page on the hub, then set HF_TOKEN "
            "to your access token and pull again."
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"{repository} has no revision {revision!r}.")
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"The hub knows no model {repository!r}, or it is private: check the spelling, or set "
            "HF_TOKEN to a token that may read it."
        )
    if isinstance(error, OfflineModeIsEnabled):
        return ModelError(f"{repository} is not here and HF_HUB_OFFLINE forbids to fetch it.")
    reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
    return ModelError(
        f"{repository} could not be downloaded; what has arrived is kept, and the next pull goes "
        "on from there. Check the network and the proxy settings, or copy the model's folder from "
        f"a machine that has it and give its path as the model. Reason: {reason}"
    )


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
