"""The edge engine as it is served: a process of its own, reached over a UNIX socket."""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp
import msgspec
import psutil

from engine_core.models import BUILTIN, ModelFiles
from engine_core.tokenizer import Tokenizer

_READY_SECONDS = 300
_NEVER = -100
"""OpenAI's bias that keeps a token from being drawn."""


@dataclass(frozen=True, slots=True)
class Request:
    """A plain completion, greedy and without an end of turn, of one tenant."""

    prompt: Sequence[int]
    max_tokens: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Timing:
    """When the tokens of a streamed answer came, on `time.monotonic()`'s clock."""

    asked: float
    tokens: list[float]

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the request to the first token."""
        return self.tokens[0] - self.asked

    @property
    def token_seconds(self) -> float:
        """Mean seconds between two tokens; 0 where there is only one."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)


class EngineClient:
    """Asks the engine for completions and watches its process.

    Args:
        pid: The engine's process.
        uds: Its socket.
        eos_ids: Tokens that end a turn, which a measured answer must not.
    """

    def __init__(self, pid: int, uds: Path, eos_ids: frozenset[int]) -> None:
        self._process = psutil.Process(pid)
        self._uds = str(uds)
        self._bias = {str(id_): _NEVER for id_ in sorted(eos_ids)}
        self._open()

    async def stream(self, request: Request) -> Timing:
        """Ask for a streamed answer and read it to its end."""
        asked = time.monotonic()
        tokens = []
        async with self._post(request, stream=True) as response:
            async for line in response.content:
                event = line.removeprefix(b"data: ").strip()
                if event in (b"", b"[DONE]"):
                    continue
                # A token that completes no character has no event, and is not counted.
                if msgspec.json.decode(event)["choices"][0]["text"]:
                    tokens.append(time.monotonic())
        return Timing(asked, tokens)

    async def whole(self, request: Request) -> None:
        """Ask for an answer in one piece."""
        async with self._post(request, stream=False) as response:
            await response.read()

    async def stats(self) -> dict[str, Any]:
        """Return the engine's stats page."""
        async with self._session.get("/engine/stats") as response:
            stats: dict[str, Any] = await response.json()
        return stats

    async def idle_stats(self, seconds: float = 10) -> dict[str, Any]:
        """Return the stats page once nothing runs or waits, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            stats = await self.stats()
            if stats["running"] == stats["waiting"] == 0 or time.monotonic() > deadline:
                return stats
            await asyncio.sleep(0.05)

    async def hang_up(self) -> None:
        """Close every connection, and wait until the engine has seen it."""
        await self._session.close()
        await asyncio.sleep(1)
        self._open()

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    def fds(self) -> int:
        """Return how many files and sockets the engine has open."""
        return int(self._process.num_fds())

    def _open(self) -> None:
        self._session = aiohttp.ClientSession(
            "http://engine",
            connector=aiohttp.UnixConnector(self._uds, limit=0),
            timeout=aiohttp.ClientTimeout(total=600),
            raise_for_status=_raise_refusal,
        )

    def _post(
        self, request: Request, *, stream: bool
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        body = {
            "model": BUILTIN,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "logit_bias": self._bias,
            "cache_salt": request.tenant,
            "stream": stream,
        }
        return self._session.post("/v1/completions", json=body)


@contextlib.asynccontextmanager
async def engine_process(files: ModelFiles, *options: str) -> AsyncIterator[EngineClient]:
    """Serve the built-in model; end the process on every path.

    Args:
        files: The built-in model's, for its end tokens.
        options: Of `python -m edge_engine serve`, besides the model and the socket.

    Raises:
        RuntimeError: the engine ended before it was ready; carries what it wrote.
    """
    # A short path of its own: socket paths are limited to about 100 characters.
    with tempfile.TemporaryDirectory(prefix="tg") as folder, tempfile.TemporaryFile() as log:
        uds = Path(folder) / "engine.sock"
        command = [sys.executable, "-m", "edge_engine", "serve", "--model", BUILTIN]
        process = await asyncio.create_subprocess_exec(
            *command, "--uds", str(uds), "--lifeline", *options,
            stdin=asyncio.subprocess.PIPE, stderr=log,
        )  # fmt: skip
        try:
            await _until_ready(process, uds, log)
            client = EngineClient(process.pid, uds, Tokenizer.load(files).eos_ids)
            try:
                yield client
            finally:
                await client.close()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _raise_refusal(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RuntimeError(f"the engine refused with {response.status}: {await response.text()}")


async def _until_ready(process: asyncio.subprocess.Process, uds: Path, log: IO[bytes]) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        # The socket accepts connections only once the model can answer.
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_unix_connection(uds)
            writer.close()
            return
        if process.returncode is not None or time.monotonic() > deadline:
            log.seek(0)
            raise RuntimeError(f"the engine is not ready; it said:\n{log.read().decode()}")
        await asyncio.sleep(0.1)
