"""The HTTP surface of an engine: OpenAI's completions and the engine's own pages."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from aiohttp import web

from engine_core.errors import ApiError, EngineFailureError, InvalidRequestError
from engine_core.requests import Ask, read_chat, read_completion
from engine_core.responses import ResponseWriter, error_event, to_json
from engine_core.types import Engine, Event, FinishEvent, Usage

MAX_BODY_BYTES = 4 * 1024 * 1024
INLINE_BODY_BYTES = 2000
"""Bodies up to here are parsed and tokenised on the event loop, which takes well under 1 ms."""

_LOCAL_HOST = re.compile(
    r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.ASCII | re.IGNORECASE
)
_PATHS = (
    "This engine has POST /v1/chat/completions and /v1/completions, and GET /v1/models, "
    "/engine/health and /engine/stats."
)

_log = logging.getLogger("tidegate.engine")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(engine: Engine) -> web.Application:
    """Return the application that serves a started engine.

    Run it with `handler_cancellation=True`, so that a client that hangs up cancels its request,
    and with `auto_decompress=False`.
    """
    app = web.Application(
        middlewares=[_errors_as_json, _local_names_only], client_max_size=MAX_BODY_BYTES
    )
    server = _Server(engine)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_post("/v1/completions", server.completion)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/engine/health", server.health)
    app.router.add_get("/engine/stats", server.stats)
    return app


class _Server:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._created = int(time.time())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_chat)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_completion)

    async def models(self, _: web.Request) -> web.Response:
        model = {
            "id": self._engine.model,
            "object": "model",
            "created": self._created,
            "owned_by": "tidegate",
        }
        return _json({"object": "list", "data": [model]})

    async def health(self, _: web.Request) -> web.Response:
        return _json(
            {
                "status": "ok",
                "model": self._engine.model,
                "context_window": self._engine.context_window,
                "capabilities": [],
            }
        )

    async def stats(self, _: web.Request) -> web.Response:
        return _json(self._engine.stats())

    async def _answer(
        self, request: web.Request, read: Callable[[bytes, Engine], Ask]
    ) -> web.StreamResponse:
        body = await _body(request)
        if len(body) <= INLINE_BODY_BYTES:
            ask = read(body, self._engine)
        else:
            ask = await asyncio.to_thread(read, body, self._engine)
        writer = ResponseWriter(ask, self._engine.model)
        watch = _Watch(ask)
        try:
            async with aclosing(watch.over(self._engine.generate(ask.generation))) as events:
                deliver = _stream if ask.stream else _whole
                return await deliver(request, events, writer)
        finally:
            watch.report()


class _Watch:
    """Times one request and writes its log line. Texts are never logged."""

    def __init__(self, ask: Ask) -> None:
        self._request = ask.generation
        self._began = time.monotonic()
        self._first: float | None = None
        self._reason = "cancelled"
        self._usage: Usage | None = None

    async def over(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Pass the events on; closing this closes them."""
        try:
            async with aclosing(events):
                async for event in events:
                    if self._first is None:
                        self._first = time.monotonic()
                    if isinstance(event, FinishEvent):
                        self._reason, self._usage = event.reason, event.usage
                    yield event
        except ApiError as error:
            self._reason = error.code or error.type
            raise

    def report(self) -> None:
        now = time.monotonic()
        tokens = self._usage.completion_tokens if self._usage else None
        first = self._first
        # The first token came with the first event; the rate is that of those after it.
        rate = (tokens - 1) / (now - first) if tokens and tokens > 1 and first else None
        _log.info(
            "request id=%s tokens_in=%d tokens_out=%s ttft_ms=%s tokens_per_s=%s finish=%s",
            self._request.id,
            len(self._request.prompt_ids),
            "-" if tokens is None else tokens,
            "-" if first is None else round((first - self._began) * 1e3),
            "-" if rate is None else f"{rate:.1f}",
            self._reason,
        )


async def _whole(
    _: web.Request, events: AsyncGenerator[Event, None], writer: ResponseWriter
) -> web.Response:
    texts: list[str] = []
    async for event in events:
        if isinstance(event, FinishEvent):
            body = writer.whole("".join(texts), event.reason, event.usage)
            return web.Response(body=body, content_type="application/json")
        texts.append(event.text)
    raise EngineFailureError("The engine ended without finishing the answer.")


async def _stream(
    request: web.Request, events: AsyncGenerator[Event, None], writer: ResponseWriter
) -> web.StreamResponse:
    # The status is sent with the first event, so that what fails before it is a true HTTP error.
    event = await anext(events)
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    pending = writer.opening()
    try:
        while not isinstance(event, FinishEvent):
            await response.write(pending + writer.piece(event.text))
            pending = b""
            event = await anext(events)
        pending += writer.closing(event.reason, event.usage)
    except ApiError as error:
        pending += error_event(error)
    await response.write(pending)
    await response.write_eof()
    return response


async def _body(request: web.Request) -> bytes:
    if request.content_type != "application/json":
        # Also what keeps a web page from posting here without asking the browser first.
        raise InvalidRequestError("The Content-Type must be application/json.", status=415)
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise InvalidRequestError("The body must not be compressed.", status=415)
    return await request.read()


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return _error(error)
    except web.HTTPRequestEntityTooLarge:
        message = f"The body is larger than {MAX_BODY_BYTES} bytes."
        return _error(InvalidRequestError(message, status=413, code="body_too_large"))
    except web.HTTPMethodNotAllowed as error:
        answer = _error(
            InvalidRequestError(f"{request.method} is not allowed here.", status=error.status)
        )
        answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except web.HTTPException as error:
        return _error(InvalidRequestError(f"{error.reason}. {_PATHS}", status=error.status))
    except ConnectionResetError:
        raise  # the client is gone; there is nobody to answer
    except Exception:  # noqa: BLE001 - a client is never shown a traceback
        _log.exception("%s %s failed", request.method, request.rel_url.raw_path)
        return _error(EngineFailureError("The engine's server failed; its log says more."))


@web.middleware
async def _local_names_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a foreign Host on TCP: a web page could point its own name at this machine."""
    transport = request.transport
    address = transport.get_extra_info("sockname") if transport else None
    if isinstance(address, tuple) and not _LOCAL_HOST.fullmatch(request.host):
        raise InvalidRequestError("This Host is not served here.", status=403)
    return await handler(request)


def _json(body: object) -> web.Response:
    return web.Response(body=to_json(body), content_type="application/json")


def _error(error: ApiError) -> web.Response:
    response = _json(error.body())
    response.set_status(error.status)
    if error.status == 503:
        response.headers["Retry-After"] = "1"
    return response
