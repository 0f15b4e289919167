"""What changes from step to step, in memory that stays where it is, so that graphs can read it.

All of it is one int32 matrix with a column for each token. It is filled on the host, in a pinned
twin, and reaches the device in one copy.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.types import TokenDraw


class InputRow(NamedTuple):
    """The tokens of one sequence in one step.

    Args:
        place: Its row of the block tables.
        begin: Tokens that its cache holds already.
        tokens: The ids that follow them, at least one.
        wants_logits: Whether the last of them is the last of the sequence.
        draw: How the next token is drawn on the device; None to take the likeliest.
    """

    place: int
    begin: int
    tokens: Sequence[int]
    wants_logits: bool
    draw: TokenDraw | None = None


class InputViews(NamedTuple):
    """A step of `size` tokens as the device sees it; int32 but for the temperatures.

    Rows, at most as many as there are sequences, are those that want logits, in their order.
    """

    tokens: torch.Tensor  # [1, size]
    positions: torch.Tensor  # [1, size]
    slots: torch.Tensor  # [size], where each token's keys and values go
    contexts: torch.Tensor  # [size], tokens that each sees, itself included
    table_rows: torch.Tensor  # [size]
    logit_rows: torch.Tensor  # [rows], places in the stream
    temperatures: torch.Tensor  # [rows], float32
    seeds: torch.Tensor  # [rows, 2], the low and the high half
    counters: torch.Tensor  # [rows], the place of the token to draw in its sequence


class _Line(IntEnum):
    """Lines of the matrix; the later ones have a column for each row that wants logits."""

    TOKENS = 0
    POSITIONS = 1
    SLOTS = 2
    CONTEXTS = 3
    TABLE_ROWS = 4
    LOGIT_ROWS = 5
    TEMPERATURES = 6
    SEED_LOW = 7
    SEED_HIGH = 8
    COUNTERS = 9


class StepInputs:
    """The inputs of steps of up to `most_tokens` tokens.

    Args:
        most_tokens: Of one step.
        table: `[rows + 1, M]` int32, the blocks of each sequence, read at every fill. The last row
            is the padding's and stays 0, which is the trash block.
        block_size: Tokens of a block.
        device: Where the model computes.
    """

    def __init__(
        self, most_tokens: int, table: NDArray[np.int32], block_size: int, device: torch.device
    ) -> None:
        self._most = most_tokens
        self._table = table
        self._block_size = block_size
        self._rows = len(table) - 1
        shape = (len(_Line), most_tokens)
        self._matrix = torch.zeros(shape, dtype=torch.int32, device=device)
        self._twin, self._copied = self._matrix, None
        if device.type == "cuda":
            self._twin = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
            self._copied = torch.cuda.Event()
        self._host: NDArray[np.int32] = self._twin.numpy()
        self._host_temperatures = self._host[_Line.TEMPERATURES].view(np.float32)

    def view(self, size: int) -> InputViews:
        """Return the first `size` tokens, and their rows; the same memory every time."""
        rows = min(size, self._rows)
        lines = self._matrix
        return InputViews(
            tokens=lines[_Line.TOKENS, :size][None],
            positions=lines[_Line.POSITIONS, :size][None],
            slots=lines[_Line.SLOTS, :size],
            contexts=lines[_Line.CONTEXTS, :size],
            table_rows=lines[_Line.TABLE_ROWS, :size],
            logit_rows=lines[_Line.LOGIT_ROWS, :rows],
            temperatures=lines[_Line.TEMPERATURES, :rows].view(torch.float32),
            seeds=lines[_Line.SEED_LOW : _Line.SEED_HIGH + 1, :rows].T,
            counters=lines[_Line.COUNTERS, :rows],
        )

    def fill(self, rows: Sequence[InputRow], size: int) -> None:
        """Put a step into the first `size` columns, and padding behind it.

        Args:
            rows: Whose tables have the blocks for their tokens.
            size: At least as many as there are tokens.

        Raises:
            ValueError: `size` is less than the tokens, or more than a step may have.
        """
        lengths = np.array([len(row.tokens) for row in rows], np.int32)
        total = int(lengths.sum())
        if not total <= size <= self._most:
            raise ValueError(
                f"{total} tokens do not fit into {size} columns of {self._most}; make the step "
                "smaller"
            )
        if self._copied is not None:
            self._copied.synchronize()  # a copy that has not run yet would read the next step
        self._fill_tokens(rows, total, lengths, size)
        self._fill_rows(rows, lengths, min(size, self._rows))
        if self._copied is not None:
            # A copy of fewer columns would not be one piece of memory, and so no faster.
            self._matrix.copy_(self._twin, non_blocking=True)
            self._copied.record()

    def _fill_tokens(
        self, rows: Sequence[InputRow], total: int, lengths: NDArray[np.int32], size: int
    ) -> None:
        places = np.repeat(np.array([row.place for row in rows], np.int32), lengths)
        # In each row the count goes on from the row's own beginning instead of the stream's.
        begins = np.array([row.begin for row in rows], np.int32)
        firsts = lengths.cumsum(dtype=np.int32) - lengths
        positions = np.arange(total, dtype=np.int32) + np.repeat(begins - firsts, lengths)
        blocks, inside = np.divmod(positions, self._block_size)
        host = self._host
        host[_Line.TOKENS, :total] = list(chain.from_iterable(row.tokens for row in rows))
        host[_Line.POSITIONS, :total] = positions
        host[_Line.SLOTS, :total] = self._table[places, blocks] * self._block_size + inside
        host[_Line.CONTEXTS, :total] = positions + 1
        host[_Line.TABLE_ROWS, :total] = places
        # Padding is token 0 at the beginning of the trash block, and sees itself alone: a row that
        # sees nothing would be no number, and one that stays from an earlier step would overwrite
        # somebody's keys.
        host[: _Line.TABLE_ROWS, total:size] = 0
        host[_Line.CONTEXTS, total:size] = 1
        host[_Line.TABLE_ROWS, total:size] = self._rows

    def _fill_rows(self, rows: Sequence[InputRow], lengths: NDArray[np.int32], count: int) -> None:
        wanted = np.flatnonzero([row.wants_logits for row in rows])
        draws = [row.draw or _LIKELIEST for row in rows if row.wants_logits]
        host, total = self._host, len(wanted)
        host[_Line.LOGIT_ROWS, :total] = lengths.cumsum()[wanted] - 1
        self._host_temperatures[:total] = [draw.temperature for draw in draws]
        seeds = np.array([draw.seed for draw in draws], "<u8").view("<i4").reshape(-1, 2)
        host[_Line.SEED_LOW : _Line.SEED_HIGH + 1, :total] = seeds.T
        # A token's place in its sequence stays the same if the sequence is computed anew.
        host[_Line.COUNTERS, :total] = [
            row.begin + len(row.tokens) for row in rows if row.wants_logits
        ]
        # Padding takes the likeliest token after the first one.
        host[_Line.LOGIT_ROWS :, total:count] = 0


_LIKELIEST = TokenDraw(temperature=0.0, seed=0)
