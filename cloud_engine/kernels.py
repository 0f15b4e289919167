"""`attention.write` and `attention.attend` as Triton kernels.

Each token of a stream is a row of its own, whatever sequence it belongs to, and everything that
varies between steps is read from the device's memory. So a launch depends on nothing but the number
of tokens, which is what lets a captured graph replay it for any step of as many.

A row's keys are cut into splits, so that one sequence alone keeps a GPU busy, and a second kernel
merges what the splits found: T. Dao et al., "Flash-Decoding for long-context inference" (2023). The
heads that share keys are the rows of one tile, so that keys are read once and tensor cores do the
sums. Sums are float32.
"""

import torch
import triton
import triton.language as tl

_PROGRAMS = 264
"""Two for each of the 132 multiprocessors of an H100 or H200 (NVIDIA, "H100 Tensor Core GPU
Architecture", 2022), so that one computes while the other waits for memory."""
_MOST_SPLITS = 64
_TILE_BYTES = 16 * 1024
"""Of keys: as many of values and the next ones of both on their way are, with what the products
need, 39 to 50 KiB by the compiler's count, so that four programs fit into the 228 KiB of shared
memory of a Hopper multiprocessor. In bfloat16 a tile is 64 keys of 128 numbers."""
_MOST_KEYS = 64
_LEAST_ROWS = 16
"""The smallest side of a tile that `tl.dot` multiplies."""


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    keys_cache: torch.Tensor,
    values_cache: torch.Tensor,
) -> None:
    """Put keys and values into their blocks; see `attention.write`."""
    tokens, kv_heads, size = key.shape
    _write[(tokens,)](
        key,
        value,
        slots,
        keys_cache,
        values_cache,
        *key.stride(),
        *value.stride(),
        kv_heads=kv_heads,
        size=size,
        cell=triton.next_power_of_2(kv_heads * size),
    )


def attend(
    query: torch.Tensor,
    keys_cache: torch.Tensor,
    values_cache: torch.Tensor,
    *,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    contexts: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend token by token; see `attention.attend`."""
    tokens, heads, size = query.shape
    _, block_size, kv_heads, _ = keys_cache.shape
    padded = triton.next_power_of_2(size)
    keys = min(_MOST_KEYS, _TILE_BYTES // (padded * keys_cache.element_size()))
    longest = tables.shape[1] * block_size
    splits = min(
        _MOST_SPLITS,
        triton.next_power_of_2(triton.cdiv(_PROGRAMS, tokens * kv_heads)),
        triton.next_power_of_2(triton.cdiv(longest, keys)),
    )
    partial = query.new_empty((tokens, heads, splits, size), dtype=torch.float32)
    weights = query.new_empty((tokens, heads, splits), dtype=torch.float32)
    out = query.new_empty((tokens, heads, size))
    _attend_split[(tokens, kv_heads, splits)](
        query,
        keys_cache,
        values_cache,
        tables,
        table_rows,
        contexts,
        partial,
        weights,
        scale,
        *query.stride(),
        tables.stride(0),
        window=window,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        rows=max(_LEAST_ROWS, triton.next_power_of_2(heads // kv_heads)),
        size=size,
        padded=padded,
        block_size=block_size,
        keys=keys,
        num_warps=4,
        num_stages=2,
    )
    _merge[(tokens, heads)](
        contexts,
        partial,
        weights,
        out,
        window=window,
        splits=splits,
        size=size,
        padded=padded,
        keys=keys,
    )
    return out


@triton.jit(
    do_not_specialize=[
        *("key_token_stride", "key_head_stride", "key_place_stride"),
        *("value_token_stride", "value_head_stride", "value_place_stride"),
    ]
)
def _write(  # noqa: PLR0917  a kernel's arguments have places
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    keys_cache: torch.Tensor,
    values_cache: torch.Tensor,
    key_token_stride: int,
    key_head_stride: int,
    key_place_stride: int,
    value_token_stride: int,
    value_head_stride: int,
    value_place_stride: int,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    cell: tl.constexpr,
) -> None:
    """Write one token's keys and values, all heads of it."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    place = tl.arange(0, cell)
    inside = place < kv_heads * size
    head, place_in_head = place // size, place % size
    key += token * key_token_stride + head * key_head_stride + place_in_head * key_place_stride
    value += (
        token * value_token_stride + head * value_head_stride + place_in_head * value_place_stride
    )
    target = slot * kv_heads * size + place
    tl.store(keys_cache + target, tl.load(key, mask=inside), mask=inside)
    tl.store(values_cache + target, tl.load(value, mask=inside), mask=inside)


@triton.jit
def _share(context: int, window: tl.constexpr, splits: int, keys: tl.constexpr) -> tuple[int, int]:
    """Return the first token that is seen and how many, a multiple of `keys`, each split takes."""
    first = 0
    if window is not None:
        first = tl.maximum(context - window, 0)
    return first, tl.cdiv(tl.cdiv(context - first, splits), keys) * keys


@triton.jit(
    do_not_specialize=["token_stride", "head_stride", "place_stride", "table_stride"],
)
def _attend_split(  # noqa: PLR0917  a kernel's arguments have places
    query: torch.Tensor,
    keys_cache: torch.Tensor,
    values_cache: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    contexts: torch.Tensor,
    partial: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    token_stride: int,
    head_stride: int,
    place_stride: int,
    table_stride: int,
    window: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    block_size: tl.constexpr,
    keys: tl.constexpr,
) -> None:
    """Attend for one token, by the heads of one key head, to one split of what it sees.

    Leaves the mean of the values, `[group, size]`, and the logarithm to base 2 of the sum of their
    weights, `[group]`.
    """
    token, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    context = tl.load(contexts + token)
    first, share = _share(context, window, splits, keys)
    begin = first + split * share
    if begin >= context:
        return
    end = tl.minimum(begin + share, context)
    table = tables + tl.load(table_rows + token).to(tl.int64) * table_stride

    row, place, key = tl.arange(0, rows), tl.arange(0, padded), tl.arange(0, keys)
    in_head = place < size
    head = kv_head * group + row
    in_group = (row[:, None] < group) & in_head[None, :]
    query += token * token_stride + head[:, None] * head_stride + place[None, :] * place_stride
    queries = tl.load(query, mask=in_group, other=0.0)
    scale *= 1.4426950408889634  # log2(e): powers of 2 are what the hardware has

    highest = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    mean = tl.zeros((rows, padded), tl.float32)
    for start in range(begin, end, keys):
        seen = start + key
        inside = seen < end
        block = tl.load(table + seen // block_size, mask=inside, other=0).to(tl.int64)
        slot = block * block_size + seen % block_size
        cell = (slot * kv_heads + kv_head)[:, None] * size + place[None, :]
        # What lies behind the end may be NaN.
        known = inside[:, None] & in_head[None, :]
        found = tl.load(keys_cache + cell, mask=known, other=0.0)
        scores = tl.dot(queries, tl.trans(found), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        likely = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(likely, axis=1)
        found = tl.load(values_cache + cell, mask=known, other=0.0)
        mean *= fade[:, None]
        mean = tl.dot(likely.to(found.dtype), found, mean, input_precision="ieee")
        highest = higher

    target = (token * kv_heads * group + head) * splits + split
    tl.store(weights + target, highest + tl.log2(total), mask=row < group)
    tl.store(
        partial + target[:, None] * size + place[None, :], mean / total[:, None], mask=in_group
    )


@triton.jit
def _merge(  # noqa: PLR0917  a kernel's arguments have places
    contexts: torch.Tensor,
    partial: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    window: tl.constexpr,
    splits: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    keys: tl.constexpr,
) -> None:
    """Merge what the splits of one head of one token found."""
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    context = tl.load(contexts + token)
    first, share = _share(context, window, splits, keys)
    split, place = tl.arange(0, splits), tl.arange(0, padded)
    used = first + split * share < context  # the others left nothing
    in_head = place < size
    source = (token * heads + head) * splits + split
    weight = tl.load(weights + source, mask=used, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, axis=0))
    means = tl.load(
        partial + source[:, None] * size + place[None, :],
        mask=used[:, None] & in_head[None, :],
        other=0.0,
    )
    merged = tl.sum(means * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    out += (token * heads + head) * size + place
    tl.store(out, merged.to(out.dtype.element_ty), mask=in_head)
