"""Only work on large bodies leaves the event loop's thread."""

import threading

import pytest

from router.targets.off_loop import INLINE_BYTES, sized


@pytest.mark.parametrize(("size", "inline"), [(INLINE_BYTES, True), (INLINE_BYTES + 1, False)])
async def test_large_work_runs_in_a_thread(size: int, inline: bool) -> None:
    thread = await sized(size, threading.get_ident)
    assert (thread == threading.get_ident()) is inline


async def test_arguments_results_and_errors_pass() -> None:
    for size in (1, INLINE_BYTES + 1):
        assert await sized(size, int, "12", base=8) == 10
        with pytest.raises(ValueError, match="invalid literal"):
            await sized(size, int, "x")
