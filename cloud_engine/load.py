"""Get a transformers model out of the model store, from safetensors or GGUF, without network."""

import io
import logging
import shutil
import sys
import tempfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from engine_core.downloads import check_room, plain_disk_errors, replace_durably
from engine_core.errors import ModelError
from engine_core.models import ModelFiles, ModelStore

# What transformers raises for files it cannot make sense of.
_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)

_log = logging.getLogger("tidegate.engine")


def load_causal_lm(
    files: ModelFiles, store: ModelStore, *, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the model, ready for inference on the device.

    A GGUF file is turned into safetensors once and kept among the store's builds: reading it
    takes transformers 15 s for a model of 135M parameters, and a mapped safetensors file 1 s.

    Raises:
        ModelError: no causal language model that transformers knows, or files that do not fit.
    """
    _be_quiet()
    if files.format == "gguf":
        folder = store.build_path(files, f"torch-{_name(dtype)}")
        with store.lock(folder.name):
            if not folder.exists():
                _log.info("converting %s to safetensors, once", files.name)
                _convert(files, folder, store, dtype)
    else:
        folder = files.path
    try:
        # Never from a pickle, which can run code.
        return _read(files, folder, dtype, use_safetensors=True).eval().to(device)
    except torch.OutOfMemoryError:
        raise ModelError(
            f"{files.name} in {_name(dtype)} does not fit on {device}; "
            "choose a smaller model or number type"
        ) from None


def _read(files: ModelFiles, folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """Let transformers read a model from a folder, every weight of it."""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except _UNREADABLE as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(f"transformers cannot load {files.name}: {first_line}") from error
    if missing := sorted(report["missing_keys"]):
        # transformers would go on with random numbers in their place.
        raise ModelError(
            f"{files.name} lacks {len(missing)} of its weights, {missing[0]} among them; "
            "fetch it again or correct its config.json"
        )
    return model


def _convert(files: ModelFiles, folder: Path, store: ModelStore, dtype: torch.dtype) -> None:
    # Its progress bar has no switch, and drawn into a log file it is noise.
    terminal = sys.stderr.isatty()
    with nullcontext() if terminal else redirect_stderr(io.StringIO()):
        model = _read(files, files.path.parent, dtype, gguf_file=files.path.name)
    # transformers 5 remembers that the weights came from GGUF and would not save what it has
    # dequantised long since.
    model.hf_quantizer = None
    size = sum(parameter.nbytes for parameter in model.parameters())
    parent = store.root / "tmp"
    with plain_disk_errors(parent, size):
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f"{folder.name}.*"):  # a killed process left it; we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        check_room(parent, size)
        workspace = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=parent))
        try:
            model.save_pretrained(workspace)
            replace_durably(workspace, folder)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)


def _be_quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
