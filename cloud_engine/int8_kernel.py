"""The product of few rows with an int8 weight, as a Triton kernel: bound by reading the weight."""

import torch
import triton
import triton.language as tl

_OUTPUTS = 32
_WIDTH_BYTES = 512
_STAGES = 4
"""A tile of the weight has 8 KiB for 16-bit activations. Three on the way beside the one at work are
what one of an H200's 132 multiprocessors needs: 4.3 TB/s at about 0.6 us of latency are 20 KiB in
each. For 32 rows they and the activations' tiles take 72 KiB of shared memory, and consumer GPUs
have 99."""


def multiply(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return `rows @ (weight * scale[:, None]).T`; see `int8.multiply`. The rows are contiguous."""
    product = rows.new_empty(len(rows), len(weight))
    _multiply[(triton.cdiv(len(weight), _OUTPUTS),)](
        rows,
        weight,
        scale,
        product,
        len(rows),
        len(weight),
        width=weight.shape[1],
        tile_rows=max(16, triton.next_power_of_2(len(rows))),
        tile_outputs=_OUTPUTS,
        tile_width=_WIDTH_BYTES // rows.element_size(),
        num_stages=_STAGES,
    )
    return product


@triton.jit
def _multiply(  # noqa: PLR0917  a kernel's arguments have places
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    product: torch.Tensor,
    row_count: int,
    output_count: int,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_width: tl.constexpr,
) -> None:
    """Compute all rows of one tile of outputs."""
    row = tl.arange(0, tile_rows)
    output = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    row_there, output_there = row < row_count, output < output_count
    # A weight can have more than 2**31 numbers.
    weight_rows = weight + output.to(tl.int64)[:, None] * width
    total = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for begin in range(0, width, tile_width):
        place = begin + tl.arange(0, tile_width)
        inside = place < width
        activations = tl.load(
            rows + row[:, None] * width + place[None, :],
            mask=row_there[:, None] & inside[None, :],
            other=0.0,
        )
        numbers = tl.load(
            weight_rows + place[None, :],
            mask=output_there[:, None] & inside[None, :],
            other=0,
        )
        # TF32 would round the activations of a float32 model.
        total = tl.dot(
            activations, tl.trans(numbers.to(activations.dtype)), total, input_precision="ieee"
        )
    total *= tl.load(scale + output, mask=output_there, other=0.0).to(tl.float32)[None, :]
    tl.store(
        product + row[:, None] * output_count + output[None, :],
        total.to(product.dtype.element_ty),
        mask=row_there[:, None] & output_there[None, :],
    )
