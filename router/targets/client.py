"""HTTP client of one target, over TCP or a UNIX socket: one request, one answer or one failure."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Self

import aiohttp

from router.guard.outcomes import Outcome, UpstreamFailure
from router.targets.chunks import StreamProgress, check_answer, error_failure, unstreamed_failure
from router.targets.off_loop import sized
from router.targets.sse import EventTooLargeError, SseEvent, SseFramer

CONNECT_SECONDS = 2.0
"""A target that accepts no connection within this is not there."""
RESOLVE_AND_CONNECT_SECONDS = 5.0
"""The same with the look-up of its name and the TLS handshake."""
IDLE_CONNECTION_SECONDS = 4.0
"""Idle connections are closed before the servers do it (uvicorn, which vLLM uses: 5 s)."""
TAIL_SECONDS = 0.05
"""How long the end of a finished stream is awaited, so that its connection can be used again."""
MAX_ANSWER_BYTES = 32 << 20
MAX_ERROR_BYTES = 64 << 10
MAX_LIFECYCLE_BYTES = 64 << 10
"""Most bytes of role chunks and empty deltas that are held before the first content."""
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class UpstreamClient:
    """Talks to one OpenAI-compatible server.

    Redirects are failures, nothing is decompressed, no cookie is kept, no proxy of the
    environment is used, and of the client's own headers only what the caller names is forwarded.

    Args:
        base_url: Where `/chat/completions` is appended, e.g. `https://host/v1`.
        socket: UNIX socket to connect to instead of the URL's host.
        key: Bearer key, sent to this server only.
    """

    def __init__(
        self, base_url: str, *, socket: Path | None = None, key: str | None = None
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._secrets = (key,) if key else ()
        headers = {"User-Agent": "tidegate", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        reuse = aiohttp.TraceConfig()
        reuse.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=_connector(socket),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            trace_configs=[reuse],
            timeout=aiohttp.ClientTimeout(
                total=None, connect=RESOLVE_AND_CONNECT_SECONDS, sock_connect=CONNECT_SECONDS
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        await self._session.close()

    async def fetch(
        self, path: str, body: bytes, choices: int, headers: Mapping[str, str] = _NO_HEADERS
    ) -> bytes:
        """Send a request and return the checked body of its answer.

        Args:
            path: Below the base URL, e.g. `/chat/completions`.
            body: JSON, with `stream` false or absent.
            choices: How many choices the request asks for.
            headers: Of this request, beside those of every request.

        Raises:
            UpstreamFailure: for everything that is not a complete answer.
        """
        async with self._post(path, body, headers) as response:
            answer = await _read(response, MAX_ANSWER_BYTES)
        await sized(len(answer), check_answer, answer, choices, self._secrets)
        return answer

    async def stream(
        self, path: str, body: bytes, choices: int, headers: Mapping[str, str] = _NO_HEADERS
    ) -> AsyncGenerator[bytes]:
        """Send a request and yield the bytes of its event stream.

        The first piece is yielded at the commit: it holds the first content, tool or reasoning
        delta, or the finish, and every lifecycle chunk before it. From then on events pass
        untouched. A stream whose choices all finished ends with `[DONE]`, whether or not the
        upstream sent it. Close the iterator to cancel the request.

        Raises:
            UpstreamFailure: before the first piece, when another target may be tried unseen;
                after it, when the answer broke off.
        """
        progress = StreamProgress(choices, self._secrets)
        framer = SseFramer()
        held = b""
        sent = False
        async with self._post(path, body, headers) as response:
            if response.content_type != "text/event-stream":
                # A server that ignores `stream`, or a proxy's page: read what it says.
                answer = await _read(response, MAX_ERROR_BYTES)
                raise unstreamed_failure(answer, self._secrets)
            async for chunk in response.content.iter_any():
                piece, failure = _take(framer, progress, chunk)
                held += piece
                if failure is not None and not sent:
                    raise failure  # even if content came with it: the client has seen nothing
                if progress.done:
                    # Before the last piece is out: a client that has it hangs up, and waiting
                    # after that would make a whole answer look like a broken one.
                    await _drain_tail(response)
                if progress.committed and held:
                    yield held
                    held = b""
                    sent = True
                elif len(held) > MAX_LIFECYCLE_BYTES:
                    raise UpstreamFailure(
                        Outcome.UPSTREAM_ERROR, "The target streams events without content."
                    )
                if failure is not None:
                    raise failure
                if progress.done:
                    return
            if not progress.complete:
                raise UpstreamFailure(
                    Outcome.UPSTREAM_ERROR, "The target's stream broke off before its end."
                )
            yield b"data: [DONE]\n\n"

    @asynccontextmanager
    async def _post(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post the body and yield a response with status 200; close it on every path."""
        try:
            response = await self._send(path, body, headers)
            try:
                if response.status != 200:
                    if 300 <= response.status < 400:
                        raise UpstreamFailure(
                            Outcome.UPSTREAM_ERROR,
                            "The target answered with a redirect, which is not followed; "
                            "check its url.",
                        )
                    error = await _read(response, MAX_ERROR_BYTES)
                    retry_after = response.headers.get("Retry-After")
                    raise error_failure(response.status, error, retry_after, self._secrets)
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise UpstreamFailure(
                        Outcome.UPSTREAM_ERROR, "The target sent a compressed answer unasked."
                    )
                yield response
            finally:
                response.close()
        except aiohttp.ConnectionTimeoutError:
            raise UpstreamFailure(
                Outcome.TIMEOUT_CONNECT, "The target accepted no connection in time."
            ) from None
        except aiohttp.ClientConnectorError:
            raise UpstreamFailure(Outcome.UPSTREAM_ERROR, "The target cannot be reached.") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamFailure(
                Outcome.UPSTREAM_ERROR,
                f"The connection to the target broke ({type(error).__name__}).",
            ) from None

    async def _send(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Post once; once more if a kept connection turned out to be dead."""
        context = SimpleNamespace(reused=False)
        try:
            return await self._post_once(path, body, headers, context)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # The server closed an idle connection just as we took it: nobody has read the
            # request. On a fresh connection the same error means that the server broke.
            if not context.reused:
                raise
        return await self._post_once(path, body, headers, SimpleNamespace())

    async def _post_once(
        self, path: str, body: bytes, headers: Mapping[str, str], context: SimpleNamespace
    ) -> aiohttp.ClientResponse:
        return await self._session.post(
            self._base_url + path,
            data=body,
            headers={"Content-Type": "application/json", **headers},
            allow_redirects=False,
            trace_request_ctx=context,
        )


def _connector(socket: Path | None) -> aiohttp.BaseConnector:
    # limit 0: how many requests run at once is decided before a target is asked.
    if socket is not None:
        return aiohttp.UnixConnector(
            path=str(socket), limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS
        )
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS)


async def _note_reuse(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.reused = True


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise UpstreamFailure(
                Outcome.UPSTREAM_ERROR, f"The target's answer is larger than {limit} bytes."
            )
    return bytes(body)


async def _drain_tail(response: aiohttp.ClientResponse) -> None:
    try:
        async with asyncio.timeout(TAIL_SECONDS):
            async for _ in response.content.iter_any():
                pass
    except (TimeoutError, aiohttp.ClientError):
        response.close()  # the answer is complete; only the connection is lost


def _take(
    framer: SseFramer, progress: StreamProgress, chunk: bytes
) -> tuple[bytes, UpstreamFailure | None]:
    """Return the bytes of the good events in a chunk, and the failure that follows them."""
    good: list[bytes] = []
    try:
        events: list[SseEvent] = framer.feed(chunk)
        for event in events:
            progress.take(event)
            if event.data is not None or progress.committed:
                good.append(event.raw)
            if progress.done:
                break
    except EventTooLargeError:
        return b"".join(good), UpstreamFailure(
            Outcome.UPSTREAM_ERROR, "The target sent a stream event that is too large."
        )
    except UpstreamFailure as failure:
        return b"".join(good), failure
    return b"".join(good), None
