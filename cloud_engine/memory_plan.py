"""From bytes to blocks: how much room for keys and values there is beside everything else.

Pure arithmetic; `runner` measures what goes in.
"""

from dataclasses import dataclass

from engine_core.byte_sizes import format_bytes
from engine_core.errors import ModelError

MIB = 2**20
BLOCK_SIZE = 16
"""Tokens of a block. Small, since only whole blocks are shared and half of a sequence's last one
is empty on average; the kernels take several blocks at a time, so that nothing is lost by it."""
UTILISATION = 0.9
"""Of a GPU's free memory that is planned with. What fragments, and what others take, is the rest."""
GRAPH_MARGIN = 1.25
"""On what the largest graph was seen to take: the smaller ones share its pool, but not all of it.
vLLM's estimate without a margin was under by a little (vllm-project/vllm#57475)."""
RESERVE = 256 * MIB
"""Of a GPU, for the driver and the libraries' lazily made workspaces."""
HOST_SHARE = 0.25
"""Of the memory that the process may take, where keys and values live on the host. Pages come in
as they are written, so this is a cap, not a cost."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How many blocks, and how long a sequence may be with them.

    `blocks` counts the trash block; `block_bytes` are keys and values of one block in all layers.
    """

    blocks: int
    block_bytes: int
    context: int
    budget: int

    @property
    def total_bytes(self) -> int:
        """What all blocks take."""
        return self.blocks * self.block_bytes

    def __str__(self) -> str:
        """Return the arithmetic, for the log."""
        return (
            f"kv: {self.blocks:,} blocks of {BLOCK_SIZE} tokens x {self.block_bytes:,} B = "
            f"{format_bytes(self.total_bytes)} of a budget of {format_bytes(self.budget)}; "
            f"sequences of up to {self.context:,} tokens"
        )


def device_budget(*, free: int, step_peak: int, graph: int) -> int:
    """Return the bytes of a GPU that keys and values may take, perhaps none.

    Args:
        free: Bytes free with the weights loaded.
        step_peak: What the largest step took on top of them while it ran.
        graph: What the capture of the largest graph took.
    """
    return max(0, int(free * UTILISATION - step_peak - graph * GRAPH_MARGIN) - RESERVE)


def plan_blocks(
    *, budget: int, block_bytes: int, context: int | None, longest: int, sequences: int
) -> BlockPlan:
    """Return as many blocks as the budget has, but no more than `sequences` could ever fill.

    A context that nobody asked for shrinks to what fits.

    Args:
        budget: Bytes for keys and values.
        block_bytes: Of one block, in all layers.
        context: Tokens of one sequence that are asked for; None for the model's own limit.
        longest: The model's own limit of tokens.
        sequences: How many may run at once.

    Raises:
        ModelError: the context is more than the model was made for, or one sequence of it does not
            fit; the message has both numbers and what to change.
    """
    if context is not None and context > longest:
        raise ModelError(
            f"a context of {context} tokens is more than this model was made for; give at most "
            f"{longest}."
        )
    wanted = context or longest
    affordable = budget // block_bytes - 1  # one is the trash block
    if affordable < blocks_for(wanted):
        fitting = max(0, affordable) * BLOCK_SIZE
        if context is not None or not fitting:
            need = -(-(blocks_for(wanted) + 1) * block_bytes // MIB)
            ways = f"raise kv_memory to {need} MiB"
            if fitting:
                ways += f", or lower context to at most {fitting} tokens"
            raise ModelError(
                f"one sequence of {wanted} tokens would take {need} MiB for keys and values, more "
                f"than the budget of {format_bytes(budget)}; {ways}."
            )
        wanted = fitting
    blocks = min(affordable, sequences * blocks_for(wanted))
    return BlockPlan(blocks + 1, block_bytes, wanted, budget)


def blocks_for(tokens: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)
