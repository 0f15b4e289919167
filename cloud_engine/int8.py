"""Weights in int8: half of bfloat16's bytes to hold, and to read in each step.

Weight-only and symmetric, one scale per output channel: the product of the activations with the
int8 numbers is that with the weights up to the channel's scale, so nothing else has to be known
about a model, and no calibration.
"""

import logging
from typing import Any

import torch
from torch import nn

from engine_core.byte_sizes import format_bytes
from engine_core.errors import ModelError

_LARGEST = 127
_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
"""Numbers of a weight that are widened at a time: on a CPU what stays in its caches, on a GPU what
keeps launches few and the room they take small."""
_PACKED_ROWS = 32
"""Up to so many rows it is faster to widen each number as it is read than the weight beforehand."""
_VECTOR = 16
"""torch's CPU kernel loads as many numbers at a time, aligned, and has no rest; it does not check."""

_log = logging.getLogger("tidegate.engine")


def quantize_linears(model: Any, *, embeddings: bool) -> None:
    """Make the linear layers of a transformers model int8, in place, one after the other.

    Never more than one layer is there twice.

    Args:
        model: A causal language model on its device; it stays there.
        embeddings: The embedding table and the head too. They are a fifth of a small model, and
            what its accuracy depends on most.

    Raises:
        ModelError: the model keeps its weights in other modules than torch's own.
    """
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if _is_linear(module, head)]
    if not names:
        raise ModelError(
            f"int8 needs a model of linear layers, and {type(model).__name__} has none; "
            "serve it with weights auto"
        )
    for name in names:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, Int8Linear.of(getattr(owner, child)))
    # transformers 5 keeps the experts of a mixture as one tensor per layer.
    if wide := sum(weight.nbytes for weight in model.parameters() if weight.ndim > 2):
        _log.warning(
            "int8 leaves %s of %s as they are: they are in no linear layers",
            format_bytes(wide),
            type(model).__name__,
        )
    if embeddings:
        _quantize_embeddings(model, head)
    _let_go_of_file(model)


class Int8Linear(nn.Module):
    """A linear layer of an int8 weight `[N, K]` and a scale `[N]` in the activations' type."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    @classmethod
    def of(cls, linear: nn.Linear) -> "Int8Linear":
        """Return the layer that is nearest to a linear one."""
        bias = None if linear.bias is None else linear.bias.detach().clone()
        return cls(*quantize_rows(linear.weight), bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[..., N]` of `[..., K]`."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        product = multiply(rows, self.weight, self.scale)
        if self.bias is not None:
            product += self.bias
        return product.view(*hidden.shape[:-1], -1)


class Int8Embedding(nn.Module):
    """An embedding table of an int8 weight `[vocab, width]` and a scale `[vocab]`."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `[..., width]` of token ids."""
        return self.weight[tokens] * self.scale[tokens][..., None]


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 numbers of the weight's shape `[N, K]` and what each row is to be scaled by.

    The scale is rounded to the weight's type first, so that its rounding is made up for. Numbers
    are -127 to 127.
    """
    quantized = torch.empty_like(weight, dtype=torch.int8)
    scale = weight.new_empty(len(weight))
    tiny = torch.finfo(weight.dtype).tiny  # also for a row of zeros
    with torch.no_grad():
        for part in _parts(weight):
            rows = weight[part].float()
            scale[part] = (rows.abs().amax(dim=1) / _LARGEST).clamp_(min=tiny)
            steps = rows / scale[part].float()[:, None]
            quantized[part] = steps.round_().clamp_(-_LARGEST, _LARGEST)
    return quantized, scale


def multiply(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return `rows @ (weight * scale[:, None]).T`, `[T, N]`.

    Few rows read the int8 numbers and nothing else: on a GPU in our kernel, since torch's has one
    thread for each output, which walks along a row of the weight alone; on a CPU in torch's, which
    is written with vector instructions for bfloat16 only. All others are widened first.

    Args:
        rows: `[T, K]`.
        weight: int8 `[N, K]`.
        scale: `[N]` in the type of the rows.
    """
    rows = rows.contiguous()
    if len(rows) <= _PACKED_ROWS:
        if rows.is_cuda:
            # Triton is only there where CUDA is.
            from cloud_engine.int8_kernel import multiply as fused_multiply  # noqa: PLC0415

            return fused_multiply(rows, weight, scale)
        if _suits_packed_product(rows):
            return torch.ops.aten._weight_int8pack_mm(rows, weight, scale)  # noqa: SLF001
    return _multiply_widened(rows, weight, scale)


def _suits_packed_product(rows: torch.Tensor) -> bool:
    aligned = rows.data_ptr() % (_VECTOR * rows.element_size()) == 0
    return bool(rows.dtype == torch.bfloat16 and rows.shape[1] % _VECTOR == 0 and aligned)


def _multiply_widened(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return the product with the weight in the type of the rows, a part of it at a time."""
    # Fewer numbers are scaled after the product, but float16 might not hold them until then.
    scale_weight = rows.dtype == torch.float16
    product = rows.new_empty(len(rows), len(weight))
    for part in _parts(weight):
        wide = weight[part].to(rows.dtype)
        if scale_weight:
            wide.mul_(scale[part, None])
        torch.mm(rows, wide.T, out=product[:, part])
    return product if scale_weight else product.mul_(scale)


def _is_linear(module: nn.Module, head: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) and module is not head


def _quantize_embeddings(model: Any, head: Any) -> None:
    """Make the embedding table int8 and the head too; where they are one, they stay one."""
    table = model.get_input_embeddings()
    if type(table) is not nn.Embedding or not isinstance(head, nn.Linear):
        raise ModelError(
            f"{type(model).__name__} does more in its embeddings than int8 ones would; "
            "quantize the layers alone"
        )
    tied = head.weight is table.weight
    small_table = Int8Embedding(*quantize_rows(table.weight))
    model.set_input_embeddings(small_table)
    if tied:
        bias = None if head.bias is None else head.bias.detach().clone()
        small_head = Int8Linear(small_table.weight, small_table.scale, bias)
    else:
        small_head = Int8Linear.of(head)
    model.set_output_embeddings(small_head)


def _let_go_of_file(model: Any) -> None:
    """Copy the weights that stay wide: on a CPU a single one keeps their whole file in memory."""
    for weight in model.parameters():
        if weight.device.type == "cpu":
            weight.data = weight.data.clone()


def _parts(weight: torch.Tensor) -> list[slice]:
    """Return slices of a weight's rows that are widened at a time."""
    step = max(1, _AT_ONCE[weight.device.type] // weight.shape[1])
    return [slice(begin, begin + step) for begin in range(0, len(weight), step)]
