"""A long prompt comes to a full GPU: what becomes of those who generate there?"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from gpu_engines import Engine

from engine_core.errors import ApiError

_MIB = 2**20
_PIECES = (1024 * _MIB, 64 * _MIB, 10 * _MIB)
"""What the ballast is made of. For a tensor of more than 1 MiB and less than 10, torch takes 20 MiB
of a GPU, and for one up to 1 MiB 2 MiB (c10/cuda/CUDACachingAllocator.h). So where between 10 and
20 MiB are left, a step of some tokens fits, and a large part of a prompt does not."""


@contextmanager
def filled(device: torch.device) -> Iterator[None]:
    """Take all memory of a GPU but 10 to 20 MiB."""
    room = torch.empty(_PIECES[-1], dtype=torch.uint8, device=device)
    ballast = []
    for size in _PIECES:
        try:
            while True:
                ballast.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            continue
    del room
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        ballast.clear()
        torch.cuda.empty_cache()


async def lost_for_want_of_memory(
    engine: Engine,
    others: list[list[int]],
    long: list[int],
    new: int,
    full: AbstractContextManager[None],
) -> int:
    """Return how many of the others are lost when a long prompt comes to a full device.

    Args:
        engine: What serves them.
        others: Prompts of the sequences that generate before and after.
        long: The prompt that comes.
        new: Tokens that each of the others is to have.
        full: Leaves no memory inside.

    Raises:
        RuntimeError: all steps had enough memory, so that nothing was shown.
    """
    begun = [asyncio.Event() for _ in others]

    async def answered(prompt: list[int], tokens: int, first: asyncio.Event) -> bool:
        count = 0
        try:
            async for _ in engine.stream(prompt, tokens):
                count += 1
                first.set()
        except ApiError as error:
            print(f"  {error}")
        finally:
            first.set()  # nobody may wait for a token that does not come
        return count == tokens

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(answered(prompt, new, first))
            for prompt, first in zip(others, begun, strict=True)
        ]
        for first in begun:
            await first.wait()
        before = engine.runner.memory_errors
        with full:
            survived = await answered(long, 1, asyncio.Event())
            errors = engine.runner.memory_errors - before
            lost = [await task for task in tasks].count(False)
    print(
        f"\nout of memory in {errors} steps: the prompt of {len(long)} tokens was "
        f"{'answered' if survived else 'refused'}, {lost} of {len(others)} others were lost"
    )
    if not errors:
        raise RuntimeError("all steps had enough memory")
    return lost
