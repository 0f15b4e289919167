"""Work that grows with a body's size, kept off the event loop once it would stall other streams."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

INLINE_BYTES = 64 << 10
"""Up to this size JSON is read, checked or written in well under a millisecond."""

P = ParamSpec("P")
T = TypeVar("T")


async def sized(size: int, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """Return `work(*args, **more)`, called in a thread if it is about more than `INLINE_BYTES`."""
    if size > INLINE_BYTES:
        return await asyncio.to_thread(work, *args, **more)
    return work(*args, **more)
