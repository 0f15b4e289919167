"""The HTTP surface of an engine: OpenAI's completions and the engine's own pages."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web

from engine_core.choices import side_by_side
from engine_core.errors import ApiError, EngineFailureError, InvalidRequestError
from engine_core.openai import parse_body, parse_json_object
from engine_core.requests import Ask, Read, read_chat, read_completion
from engine_core.responses import StreamWriter, WholeWriter, error_event, to_json
from engine_core.types import Engine, Event, FinishEvent
from engine_core.urgency import read_urgency

if TYPE_CHECKING:
    # Only engines need the libraries behind it.
    from engine_core.grammar_compiler import TokenMatcher

MAX_BODY_BYTES = 4 * 1024 * 1024
INLINE_BODY_BYTES = 2000
"""Bodies up to here are parsed and tokenised on the event loop, which takes well under 1 ms."""
COMPILERS = 2
"""Threads that compile grammars. Each may take seconds, and no other request should wait for it."""

_LOCAL_HOST = re.compile(
    r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.ASCII | re.IGNORECASE
)
PATHS = (
    "POST /v1/chat/completions, /v1/completions and /engine/pressure, and GET "
    "/v1/models, /engine/health and /engine/stats"
)
"""What an engine answers, for whoever knocks elsewhere."""

_log = logging.getLogger("tidegate.engine")

Indexed = AsyncGenerator[tuple[int, Event], None]
"""Events of all choices, each with the index of its choice."""
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
    app.router.add_post("/engine/pressure", server.pressure)
    return app


class _Pressure(msgspec.Struct, forbid_unknown_fields=True):
    level: Annotated[int, msgspec.Meta(ge=0, le=4)]


class _Server:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._created = int(time.time())
        self._compilers = ThreadPoolExecutor(COMPILERS, "compiler")

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
                "capabilities": self._capabilities(),
            }
        )

    async def stats(self, _: web.Request) -> web.Response:
        return _json(self._engine.stats())

    async def pressure(self, request: web.Request) -> web.Response:
        asked = parse_body(parse_json_object(await _body(request)), _Pressure)
        return _json(await self._engine.pressure(asked.level))

    def _capabilities(self) -> list[str]:
        """Return what the engine does beyond text for text, in the words of the router."""
        tokenizer = self._engine.tokenizer
        json = ["json"] if tokenizer.follows_grammars else []
        tools = ["tools"] if tokenizer.tool_format else []
        return [*json, "logit_bias", "logprobs", "n", *tools]

    async def _answer(self, request: web.Request, read: Read) -> web.StreamResponse:
        urgency = read_urgency(request.headers, time.monotonic())
        body = await _body(request)
        if len(body) <= INLINE_BODY_BYTES:
            ask = read(body, self._engine, urgency)
        else:
            ask = await asyncio.to_thread(read, body, self._engine, urgency)
        held: TokenMatcher | None = None
        if ask.grammar is not None:
            # Compiled here, where a wrong one is still the client's mistake and nothing waits; and
            # held until the answer ends, or the engine might have to do it between two steps.
            compile_ = self._engine.tokenizer.matcher
            held = await asyncio.get_running_loop().run_in_executor(
                self._compilers, compile_, ask.grammar
            )
        watch = _Watch(ask)
        events = side_by_side([self._engine.generate(each) for each in ask.generations])
        try:
            async with aclosing(watch.over(events)) as watched:
                if ask.stream:
                    return await _stream(request, watched, StreamWriter(ask, self._engine))
                return await _whole(watched, WholeWriter(ask, self._engine), slow=ask.logprobs)
        finally:
            watch.report()
            del held


class _Watch:
    """Times one request and writes its log line. Texts are never logged."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._began = time.monotonic()
        self._first: float | None = None
        self._finished: list[FinishEvent] = []
        self._error: str | None = None

    async def over(self, events: Indexed) -> Indexed:
        """Pass the events on; closing this closes them."""
        try:
            async with aclosing(events):
                async for index, event in events:
                    if self._first is None:
                        self._first = time.monotonic()
                    if isinstance(event, FinishEvent):
                        self._finished.append(event)
                    yield index, event
        except ApiError as error:
            self._error = error.code or error.type
            raise

    def report(self) -> None:
        now = time.monotonic()
        first = self._first
        generations = self._ask.generations
        ended = len(self._finished) == len(generations)
        tokens = sum(each.usage.completion_tokens for each in self._finished)
        # The first token came with the first event; the rate is that of those after it.
        rate = (tokens - 1) / (now - first) if ended and tokens > 1 and first else None
        reasons = ",".join(dict.fromkeys(each.reason for each in self._finished))
        _log.info(
            "request id=%s choices=%d tokens_in=%d tokens_out=%s ttft_ms=%s tokens_per_s=%s "
            "finish=%s",
            generations[0].id,
            len(generations),
            len(generations[0].prompt_ids),
            tokens if ended else "-",
            "-" if first is None else round((first - self._began) * 1e3),
            "-" if rate is None else f"{rate:.1f}",
            self._error or (reasons if ended else "cancelled"),
        )


async def _whole(events: Indexed, writer: WholeWriter, *, slow: bool) -> web.Response:
    async for index, event in events:
        writer.take(index, event)
    body = await asyncio.to_thread(writer.body) if slow else writer.body()
    return web.Response(body=body, content_type="application/json")


async def _stream(
    request: web.Request, events: Indexed, writer: StreamWriter
) -> web.StreamResponse:
    # The status is sent with the first event, so that what fails before it is a true HTTP error.
    arrived = await anext(events, None)
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    pending = writer.opening()
    try:
        while arrived is not None:
            pending += writer.take(*arrived)
            # What ends a choice goes out with what follows it, mostly the end of the stream.
            if pending and not isinstance(arrived[1], FinishEvent):
                await response.write(pending)
                pending = b""
            arrived = await anext(events, None)
        pending += writer.closing()
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
        return _error(_http_error(error))
    except ConnectionResetError:
        raise  # the client is gone; there is nobody to answer
    except Exception:  # noqa: BLE001 - a client is never shown a traceback
        _log.exception("%s %s failed", request.method, request.rel_url.raw_path)
        return _error(EngineFailureError("The engine's server failed; its log says more."))


def _http_error(error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return InvalidRequestError(
            f"This engine does not offer this path; it has {PATHS}.", status=404, code="not_found"
        )
    return InvalidRequestError(f"{error.reason}.", status=error.status)


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
