"""Attention over blocks by torch's own kernels, sequence by sequence: for CPUs, and for long inputs."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

_ALIKE = 64
"""Sequences are attended to together if their lengths are the same in steps of so many tokens."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one sequence in a stream.

    Args:
        begin: Place in the stream of the first.
        end: Place behind the last.
        row: The sequence's row of `tables`.
        context: Tokens that the last one sees, itself included.
    """

    begin: int
    end: int
    row: int
    context: int


class Spans:
    """The sequences of a stream, sorted by how they are attended to.

    A sequence of which there are several tokens is attended to by itself. Those with one token are
    attended to together with others of about their length, since each call costs as much as reading
    some two hundred tokens.

    Args:
        spans: All sequences of the stream.
        tables: See `PackedStep`.
        block_size: Tokens of a block.
    """

    def __init__(self, spans: Iterable[Span], tables: torch.Tensor, block_size: int) -> None:
        self.chunks: list[Span] = []
        alike: dict[int, list[Span]] = {}
        for span in spans:
            if span.end - span.begin > 1:
                self.chunks.append(span)
            else:
                alike.setdefault(-(-span.context // _ALIKE), []).append(span)
        self.singles = [Singles(group, tables, block_size) for group in alike.values()]


class Singles:
    """Sequences of about the same length of which the stream has one token each.

    Args:
        spans: At least one.
        tables: See `PackedStep`.
        block_size: Tokens of a block.
    """

    def __init__(self, spans: list[Span], tables: torch.Tensor, block_size: int) -> None:
        device = tables.device
        contexts = [span.context for span in spans]
        self.seen = max(contexts)
        self.places = torch.tensor([span.begin for span in spans], device=device)
        rows = torch.tensor([span.row for span in spans], device=device)
        self._blocks = tables[rows, : -(-self.seen // block_size)].flatten()
        # Blocks of one sequence that follow each other need not be copied. A GPU's tables are not
        # read on the host.
        self._run: slice | None = None
        if len(spans) == 1 and device.type == "cpu":
            first = int(self._blocks[0])
            if bool((self._blocks.diff() == 1).all()):
                self._run = slice(first * block_size, first * block_size + self.seen)
        self._shortest = min(contexts)
        self._contexts = torch.tensor(contexts, device=device)[:, None, None, None]
        places = torch.arange(self._shortest, self.seen, device=device)
        self._behind = places[:, None, None] >= self._contexts
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def gather(self, cache: torch.Tensor) -> torch.Tensor:
        """Return keys or values of one layer, `[n, kv_heads, seen, head_dim]`."""
        if self._run is not None:
            found = cache.flatten(0, 1)[None, self._run]
        else:
            found = cache.index_select(0, self._blocks)
            found = found.view(len(self.places), -1, *cache.shape[2:])[:, : self.seen]
        if self._shortest < self.seen:
            # Behind a sequence's end there may be what a failed one has left, and a weight of 0
            # would let NaN through.
            found[:, self._shortest :].masked_fill_(self._behind, 0)
        return found.transpose(1, 2)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Return which of its tokens each sequence sees, `[n, 1, 1, seen]`; None for all of them.

        Args:
            window: How many of the latest.
        """
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        if self._shortest == self.seen and (window is None or window >= self.seen):
            return None
        places = torch.arange(self.seen, device=self._contexts.device)
        seen = places < self._contexts
        return seen if window is None else seen & (places >= self._contexts - window)


def attend_spans(
    query: torch.Tensor,
    keys_cache: torch.Tensor,
    values_cache: torch.Tensor,
    *,
    spans: Spans,
    tables: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend to what each token of a stream sees; return `[T, heads, head_dim]`.

    Args:
        query: `[T, heads, head_dim]`, all of them in `spans`.
        keys_cache: `[blocks, block_size, kv_heads, head_dim]`, with this step's keys.
        values_cache: The same.
        spans: Whose the tokens are.
        tables: int32 `[rows, blocks of the longest sequence]`.
        scale: What scores are multiplied with.
        window: How many of its latest tokens a token sees; None for all.
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for singles in spans.singles:
        alone = len(singles.places) == len(query)  # and so in the stream's order
        attended = _attend_singles(
            query if alone else query.index_select(0, singles.places),
            singles.gather(keys_cache),
            singles.gather(values_cache),
            mask=singles.mask(window),
            scale=scale,
        )
        if alone:
            return attended
        out.index_copy_(0, singles.places, attended)
    for span in spans.chunks:
        out[span.begin : span.end] = _attend_span(
            query[span.begin : span.end],
            keys_cache,
            values_cache,
            table=tables[span.row],
            context=span.context,
            scale=scale,
            window=window,
        )
    return out


def _attend_singles(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attend for one token each, `[n, heads, head_dim]`, to `[n, kv_heads, seen, head_dim]`."""
    # Heads of the same keys pass for queries of one head, so that nothing is repeated for them.
    queries = query.reshape(len(query), keys.shape[1], -1, query.shape[2])
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return out.flatten(1, 2)


def _attend_span(
    query: torch.Tensor,
    keys_cache: torch.Tensor,
    values_cache: torch.Tensor,
    *,
    table: torch.Tensor,
    context: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend for the latest tokens of one sequence, whose keys and values are written already."""
    count, block_size = query.shape[0], keys_cache.shape[1]
    # The oldest token that any of them sees.
    first = 0 if window is None else max(0, context - count - window + 1)
    first_block = first // block_size
    blocks = table[first_block : -(-context // block_size)]
    inside = slice(first - first_block * block_size, context - first_block * block_size)
    keys, values = (
        # Heads of the same keys become a batch, so that nothing is repeated for them.
        cache.index_select(0, blocks).flatten(0, 1)[inside].transpose(0, 1)[:, None]
        for cache in (keys_cache, values_cache)
    )  # [kv_heads, 1, seen, head_dim]
    queries = query.transpose(0, 1).unflatten(0, (keys.shape[0], -1))
    group, seen = queries.shape[1], keys.shape[2]
    out = scaled_dot_product_attention(
        queries,
        keys.expand(-1, group, -1, -1),
        values.expand(-1, group, -1, -1),
        attn_mask=_span_mask(count, seen, window, query.device),
        scale=scale,
    )
    return out.flatten(0, 1).transpose(0, 1)


def _span_mask(
    count: int, seen: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Return what `count` tokens see, the last of them all of `seen`; None if each sees all."""
    if count == 1:
        return None
    if window is None or seen <= window:
        # Torch's kernels for the CPU know only the square one; it would warn and build the mask.
        if count == seen or device.type == "cuda":
            return causal_lower_right(count, seen)
        window = seen
    places = torch.arange(seen, device=device)
    latest = places[seen - count :, None]
    return (places <= latest) & (places > latest - window)
