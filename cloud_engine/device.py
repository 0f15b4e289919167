"""Where the model runs and in which number type."""

import torch

from engine_core.errors import ModelError


def pick_device(wanted: str) -> torch.device:
    """Return the device; `auto` is the GPU if there is one.

    Raises:
        ModelError: a GPU is wanted and there is none that torch can use.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "device cuda is wanted, but torch finds no usable GPU: "
            "check the driver with nvidia-smi and that torch was built with CUDA, "
            "or set the device to auto or cpu"
        )
    return torch.device(wanted)


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return the number type; `auto` is bfloat16 on a GPU and float32 on a CPU.

    bfloat16 halves what a step reads and has float32's range. On most CPUs it has no fast kernels.
    """
    if wanted == "auto":
        wanted = "bfloat16" if device.type == "cuda" else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]
