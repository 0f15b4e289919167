"""The memory that blocks of keys and values and the tables of blocks are in, on host and device."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from cloud_engine.memory_plan import BLOCK_SIZE
from engine_core.kv_memory import KvMemory


class KvPool:
    """Blocks of keys and values for each layer, `[blocks, BLOCK_SIZE, kv_heads, head_size]`.

    On a GPU they are allocated once, for good. In the machine's own memory, pages come as they are
    written and can be given back.

    Args:
        layers: The key-value heads and the size of a head of each layer.
        blocks: How many, with the trash block.
        rows: Rows of the block table, with the padding's.
        width: Blocks of the longest sequence.
        dtype: Of keys and values.
        device: Where the model computes.

    Raises:
        ModelError: the machine has no room for them.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        *,
        blocks: int,
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._host: KvMemory | None = None
        shapes = [(blocks, BLOCK_SIZE, heads, size) for heads, size in layers for _ in range(2)]
        if device.type == "cuda":
            parts = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
            twin = torch.zeros((rows, width), dtype=torch.int32, pin_memory=True)
            self.tables = torch.zeros((rows, width), dtype=torch.int32, device=device)
        else:
            parts = self._on_host(shapes, dtype)
            twin = self.tables = torch.zeros((rows, width), dtype=torch.int32)
        self.keys, self.values = parts[::2], parts[1::2]
        self._twin = twin
        self.table = twin.numpy()
        """The host's side of `tables`, int32 `[rows, width]`, which is written to."""

    def send(self, rows: Iterable[int]) -> None:
        """Bring changed rows of the table to the device."""
        if self._twin is not self.tables:
            for row in rows:
                self.tables[row].copy_(self._twin[row], non_blocking=True)

    def release(self, blocks: Iterable[int]) -> None:
        """Give the pages of blocks that hold nothing back, where that is possible."""
        if self._host is None:
            return
        for block in blocks:
            for part in (*self.keys, *self.values):
                self._host.release(part[block].view(torch.uint8).numpy())

    def resident_bytes(self) -> int:
        """Return how much of the machine's own memory it has now."""
        return 0 if self._host is None else self._host.resident_bytes()

    def _on_host(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape in shapes]
        self._host = host = KvMemory(sum(map(KvMemory.room_for, sizes)))
        # NumPy knows no bfloat16.
        return [
            torch.from_numpy(host.array((size,), np.uint8)).view(dtype).view(shape)
            for shape, size in zip(shapes, sizes, strict=True)
        ]
