"""Blocks of keys and values: who holds which, and which are kept for whoever comes back.

A sequence's tokens lie in blocks of equal size, wherever one was free; a row of the block table
says where. A full block is known by a digest of its tokens and of all before them, so that a
sequence that begins in the same way takes it over instead of computing it. Blocks that nobody holds
stay until their room is needed, the ones that were left longest ago going first.

No device memory is touched here: this is only the bookkeeping.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine_core.scheduler import Placement

DIGEST_BYTES = 32
"""Two tenants' blocks must not meet by a digest that somebody has searched for: 2**128 tries."""


@dataclass(slots=True)
class _Held:
    """The blocks of one sequence; `full` of them, at the front, are what `digest` stands for."""

    blocks: list[int]
    full: int
    digest: bytes


class BlockSpace:
    """A `KVSpace` of blocks that sequences share where they begin alike.

    Where two sequences compute the same tokens side by side, the first block to become full is the
    one that is shared later; the other stays its sequence's own.

    Args:
        blocks: How many there are. Block 0 is never given out: what belongs to no sequence is
            written there. The others are at least as many as a row of `table` has.
        block_size: Tokens of a block, at least 2.
        rows: How many sequences fit.
        table: Block ids, `[rows + 1, blocks of the longest sequence]`, written in place. A
            sequence's place is its row; what is behind its blocks is 0, and so is the last row.
    """

    def __init__(self, blocks: int, block_size: int, rows: int, table: NDArray[np.int32]) -> None:
        if blocks - 1 < table.shape[1]:
            raise ValueError(
                f"{blocks - 1} blocks are less than a sequence of {table.shape[1]} may need"
            )
        self.limit = rows
        """Sequences that may be placed at once, at most `rows`; those that are placed stay."""
        self.evicted_total = 0
        """How many blocks were given away though somebody might have come back for them."""
        self._block_size = block_size
        self._table = table
        self._table.fill(0)
        self._changed = dict.fromkeys(range(rows + 1))
        self._places = list(reversed(range(rows)))
        self._held: dict[int, _Held] = {}
        self._refused: list[int] | None = None  # the last to find no room, if nobody has left since
        self._uses = [0] * blocks
        self._plain = list(reversed(range(1, blocks)))  # in no use, and with nothing worth keeping
        self._idle: OrderedDict[int, None] = OrderedDict()  # in no use but known, oldest first
        self._known: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """How many sequences could be admitted now, if a block is enough for each."""
        # Each takes a block, and asks for one more to be free for everyone before it.
        room = (self.free_blocks - len(self._held) + 1) // 2
        return max(0, min(self.limit - len(self._held), room))

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._plain) + len(self._idle)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return len(self._uses) - 1 - self.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Free blocks that are kept for whoever comes back."""
        return len(self._idle)

    def changed(self) -> list[int]:
        """Return the rows of the table that changed since the last call; at first, all of them."""
        rows = list(self._changed)
        self._changed.clear()
        return rows

    def admit(self, tokens: list[int], salt: str) -> Placement | None:
        """Reserve blocks for these tokens and one more; see `engine_core.scheduler.KVSpace`.

        Every sequence that is placed already must be able to grow by a block afterwards. Otherwise
        the new one would soon be made to leave again, and what it had computed would be lost.
        """
        # The first of the waiting list asks before every step, and to look up 100,000 tokens takes
        # 13 ms. It gets room when somebody leaves.
        if not self.free or tokens is self._refused:
            return None
        # The longest sequence has no room for one more, and needs none.
        needed = min(len(tokens) // self._block_size + 1, self._table.shape[1])
        held = self._find(tokens, salt)
        idle = [block for block in held.blocks if not self._uses[block]]
        fresh = needed - len(held.blocks)
        if fresh + len(idle) + len(self._held) > self.free_blocks:
            self._refused = tokens
            return None
        for block in held.blocks:
            self._uses[block] += 1
        for block in idle:
            del self._idle[block]
        cached = len(held.blocks) * self._block_size
        held.blocks += self._take(fresh)
        place = self._places.pop()
        self._held[place] = held
        self._table[place, :needed] = held.blocks
        self._changed[place] = None
        return Placement(place, cached)

    def grow(self, place: int, length: int) -> bool:
        """Add blocks until so many tokens fit, or none; see `engine_core.scheduler.KVSpace`."""
        blocks = self._held[place].blocks
        begin, end = len(blocks), -(-length // self._block_size)
        if end <= begin:
            return True
        if end - begin > self.free_blocks:
            return False
        blocks += self._take(end - begin)
        self._table[place, begin:end] = blocks[begin:]
        self._changed[place] = None
        return True

    def written(self, place: int, tokens: list[int], end: int) -> None:
        """Note that keys and values are in place, so that blocks they fill can be found.

        Args:
            place: Where `admit` has put the sequence.
            tokens: The sequence, at least `end` tokens.
            end: How many of them are in place, no fewer than at the last call.
        """
        held = self._held[place]
        if (held.full + 1) * self._block_size > end:  # every row asks after every step
            return
        for digest in self._chain(held.digest, tokens, held.full, end):
            block = held.blocks[held.full]
            if digest not in self._known:
                self._known[digest] = block
                self._digests[block] = digest
            held.full += 1
            held.digest = digest

    def release(self, place: int, tokens: list[int], generated: int) -> None:  # noqa: ARG002
        """Take blocks back; the full ones can be found until they are needed.

        What is not in `tokens` cannot be found any more, not even by those who took it over from
        somebody else: a sequence that fails over and over must not meet its bad blocks again.
        """
        self._refused = None
        held = self._held.pop(place)
        kept = len(tokens) // self._block_size
        # From the end, since a block is of no use without those before it.
        for index in reversed(range(len(held.blocks))):
            block = held.blocks[index]
            if index >= kept:
                self._unlearn(block)
            self._uses[block] -= 1
            if self._uses[block]:
                continue
            if block in self._digests:
                self._idle[block] = None
            else:
                self._plain.append(block)
        self._table[place, : len(held.blocks)] = 0
        self._changed[place] = None
        self._places.append(place)

    def forget(self) -> list[int]:
        """Drop what is kept for whoever comes back; return the blocks that held it."""
        forgotten = []
        # One at a time, since sequences leave meanwhile: this runs between steps, without the lock
        # that a cancelled request takes, and must not drop a block that it has not seen.
        while self._idle:
            block, _nothing = self._idle.popitem(last=False)
            self._unlearn(block)
            self._plain.append(block)
            forgotten.append(block)
        return forgotten

    def _find(self, tokens: list[int], salt: str) -> _Held:
        """Return the known blocks that the tokens begin with, short of the last token."""
        # A salt is a client's choice: without a domain of its own, one that spells the input of
        # some block's digest would lead to that block's successors.
        held = _Held(
            [], 0, blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"salt").digest()
        )
        for digest in self._chain(held.digest, tokens, 0, len(tokens) - 1):
            block = self._known.get(digest)
            if block is None:
                break
            held.blocks.append(block)
            held.full += 1
            held.digest = digest
        return held

    def _chain(self, parent: bytes, tokens: list[int], full: int, end: int) -> Iterator[bytes]:
        """Yield the digests of blocks that are full with `end` tokens, from block `full` on."""
        size = self._block_size
        for begin in range(full * size, end - size + 1, size):
            ids = array("i", tokens[begin : begin + size]).tobytes()
            parent = blake2b(parent + ids, digest_size=DIGEST_BYTES).digest()
            yield parent

    def _take(self, count: int) -> list[int]:
        """Return so many free blocks, which there must be, as the only user's."""
        taken = []
        for _ in range(count):
            if self._plain:
                block = self._plain.pop()
            else:
                block, _nothing = self._idle.popitem(last=False)
                self._unlearn(block)
                self.evicted_total += 1
            self._uses[block] = 1
            taken.append(block)
        return taken

    def _unlearn(self, block: int) -> None:
        """Make a block impossible to find."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._known[digest]
