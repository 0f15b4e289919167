"""A fake OpenAI server that answers byte for byte as a test says, well or badly."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class FakeUpstream:
    """Takes connections, notes requests, plays answers; the last answer repeats."""

    answers: Sequence[Answer]
    url: str = ""
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    connections: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first request has come."""
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client closes while its answer is still being played."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await read_head(reader):
                line, headers = head
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.requests.append((line, headers, json.loads(body) if body else {}))
                self.asked.set()
                answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
                gone = asyncio.create_task(reader.read(1))
                played = asyncio.ensure_future(answer(reader, writer))
                await asyncio.wait({gone, played}, return_when=asyncio.FIRST_COMPLETED)
                if not played.done():
                    self.hung_up.set()
                    played.cancel()
                    return
                played.result()
                if writer.is_closing():
                    gone.cancel()
                    return
                gone.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await gone
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]] | None:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    line, *fields = raw.decode().strip().split("\r\n")
    return line, {k.strip().lower(): v.strip() for k, _, v in (f.partition(":") for f in fields)}


@contextlib.asynccontextmanager
async def fake_upstream(
    *answers: Answer, socket: Path | None = None
) -> AsyncIterator[FakeUpstream]:
    upstream = FakeUpstream(answers)
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        with contextlib.suppress(asyncio.CancelledError):
            await upstream.serve(reader, writer)

    if socket is not None:
        server = await asyncio.start_unix_server(connected, str(socket))
    else:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield upstream
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks)


def chunk(
    delta: dict[str, Any] | None = None, finish: str | None = None, index: int = 0, **more: Any
) -> bytes:
    """One `data:` event of a chat stream."""
    choices = [{"index": index, "delta": delta or {}, "finish_reason": finish}]
    return event({"object": "chat.completion.chunk", "choices": choices, **more})


def event(document: Any) -> bytes:
    text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


ROLE = chunk({"role": "assistant", "content": ""})
DONE = b"data: [DONE]\n\n"
HELLO = chunk({"content": "Hello"})
STOP = chunk(finish="stop")


def completion(text: str = "Hello", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"object": "chat.completion", "choices": [choice], **more}


def error(message: str, code: Any = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "code": code, "param": param}}


def reply(document: Any, status: int = 200, **headers: str) -> Answer:
    """A whole answer with a length; the connection stays open."""

    async def play(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        lines = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body)
        await writer.drain()

    return play


def sse(*pieces: bytes | float, end: bool = True) -> Answer:
    """A chunked event stream; a number is a pause in seconds; without `end` it is cut off."""

    async def play(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for piece in pieces:
            if isinstance(piece, bytes):
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
            else:
                await asyncio.sleep(piece)
        if end:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        else:
            writer.close()

    return play


async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close without a word."""
    writer.close()


async def stay_silent(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Accept and never answer."""
    await asyncio.Event().wait()


async def garbage(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer in another protocol."""
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    await writer.drain()
    writer.close()
