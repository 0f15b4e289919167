"""Random steps for trying graphs out."""

import numpy as np

from cloud_engine.kv_pool import KvPool
from cloud_engine.memory_plan import BLOCK_SIZE
from cloud_engine.step_inputs import InputRow
from engine_core.types import TokenDraw


class Samples:
    """Makes random steps in blocks of a pool that nobody uses yet.

    Args:
        pool: Its table and its blocks are written to.
        running: Sequences that may be in a step.
    """

    def __init__(self, pool: KvPool, running: int) -> None:
        self._pool = pool
        self._random = np.random.default_rng(0)
        rows, width = pool.table.shape
        blocks = len(pool.keys[0]) - 1
        self._places = min(running, rows - 1, blocks)
        per_place = min(width, blocks // self._places)
        self._room = per_place * BLOCK_SIZE
        used = self._places * per_place
        pool.table[: self._places, :per_place] = np.arange(1, used + 1).reshape(-1, per_place)
        pool.send(range(rows))
        for part in (*pool.keys, *pool.values):
            part[: used + 1].normal_()

    def __call__(self, size: int) -> list[InputRow]:
        """Return rows of `size` tokens in all."""
        count = min(size, self._places)
        lengths = [size // count + (index < size % count) for index in range(count)]
        if lengths[0] >= self._room:
            raise ValueError(f"{size} tokens are more than all sequences together can have")
        rows = []
        for place, length in enumerate(lengths):
            begin = int(self._random.integers(1, self._room - length + 1))
            tokens = self._random.integers(0, 32, length).tolist()
            # Half of them so hot that a draw with another seed or at another place shows.
            seed = int(self._random.integers(2**63))
            draw = TokenDraw(50.0, seed) if place % 2 else None
            rows.append(InputRow(place, begin, tokens, wants_logits=True, draw=draw))
        return rows
