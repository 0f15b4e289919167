"""A child's standard error: passed on line by line, its last line remembered."""

import asyncio
import contextlib
import re
import sys

MAX_LINE_BYTES = 2000
_CLOSE_SECONDS = 1.0
_LINE_END = re.compile(rb"[\r\n]+")  # a progress bar ends its lines with CR


class StderrTail:
    """Reads a stream until its end.

    Args:
        name: Put before each line that is passed on.
        stream: The child's standard error.
    """

    def __init__(self, name: str, stream: asyncio.StreamReader) -> None:
        self.last_line = ""
        self._name = name
        self._stream = stream
        self._task = asyncio.create_task(self._read(), name=f"stderr-{name}")

    async def finish(self) -> None:
        """Take what is still in the pipe; a grandchild that holds it open is not awaited."""
        await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
        self._task.cancel()

    async def _read(self) -> None:
        rest = b""
        while chunk := await self._stream.read(4096):
            *lines, rest = _LINE_END.split(rest + chunk)
            for line in lines:
                self._pass_on(line)
            if len(rest) > MAX_LINE_BYTES:
                self._pass_on(rest)
                rest = b""
        self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="replace").rstrip()
        if text:
            self.last_line = text
            # Ours may be closed (a terminal that went away): the child's is read on all the same,
            # or the child stands still once its pipe is full.
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{self._name} | {text}\n")
