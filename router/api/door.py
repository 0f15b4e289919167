"""The HTTP surface for clients: completions, models, health, metrics."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from engine_core.errors import ApiError, InvalidRequestError
from engine_core.http_log import http_log
from engine_core.urgency import read_urgency
from router.api.call import CHAT, COMPLETIONS, Call, Route
from router.api.errors import (
    OUR_FAULT,
    error_response,
    errors_as_json,
    failure_error,
    hide_banner,
    log,
)
from router.api.exchange import Exchange
from router.api.in_flight import InFlight
from router.decide.decision import AUTO, Decision, TargetInfo
from router.decide.view import RequestView
from router.guard.outcomes import Outcome, UpstreamFailure
from router.observe.metrics import Metrics
from router.observe.record import RequestRecord, log_request
from router.targets.off_loop import sized
from router.targets.target import Target

TOTAL_SECONDS = 600.0
"""Longest life of one request, over all its tries; OpenAI's own client gives up then, too."""
KEEPALIVE_SECONDS = 75.0
"""Idle client connections live this long; nginx's default, so that proxies close first."""

Decide = Callable[[RequestView, str, Sequence[TargetInfo], str], Decision]
"""From view, model name, targets as they are now and decision id; may raise `ApiError`."""


class Door:
    """Takes requests, decides, answers.

    Args:
        targets: All targets by name, in the order of the configuration.
        decide: The policy in force.
        metrics: Where endings are counted.
        max_body_bytes: Larger bodies are refused with 413.
    """

    def __init__(
        self,
        *,
        targets: Mapping[str, Target],
        decide: Decide,
        metrics: Metrics,
        max_body_bytes: int,
    ) -> None:
        self.in_flight = InFlight()
        self._targets = targets
        self._decide = decide
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._opened = int(time.time())

    def make_runner(self, *, shutdown_seconds: float) -> web.AppRunner:
        """Return the HTTP server, not yet listening.

        Args:
            shutdown_seconds: What requests get to end by themselves when it is cleaned up.
        """
        return web.AppRunner(
            self._make_app(),
            handler_cancellation=True,  # a client that hangs up cancels its request
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_SECONDS,
            shutdown_timeout=shutdown_seconds,
            logger=http_log("tidegate.http"),
        )

    def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[errors_as_json], client_max_size=self._max_body_bytes)
        app.on_response_prepare.append(hide_banner)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/v1/models/{model:.+}", self._show_model)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show_metrics)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CHAT)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, COMPLETIONS)

    async def _answer(self, request: web.Request, route: Route) -> web.StreamResponse:
        record = RequestRecord(route=route.name, started=time.monotonic())
        self._metrics.in_flight.inc()
        try:
            response = await self._within_time(request, route, record)
            record.status = response.status
        except asyncio.CancelledError:
            record.outcome, record.status = Outcome.CLIENT_CLOSED, 499
            raise
        except Exception:
            # A fault of ours; the house has no word for it, the code says so.
            record.outcome, record.code, record.status = Outcome.UPSTREAM_ERROR, "internal", 500
            raise
        finally:
            self._metrics.in_flight.dec()
            record.ended = time.monotonic()
            self._metrics.finished(record)
            log_request(record)
        if self.in_flight.draining:
            response.force_close()
        return response

    async def _within_time(
        self, request: web.Request, route: Route, record: RequestRecord
    ) -> web.StreamResponse:
        """Answer before the total timeout, with an error if need be."""
        exchange: Exchange | None = None
        retry_after: int | None = None
        try:
            async with asyncio.timeout(TOTAL_SECONDS) as timer:
                with self.in_flight.hold(timer):
                    urgency = read_urgency(request.headers, record.started)
                    call = await self._read(request, route, record)
                    decision = self._choose(call, record)
                    exchange = Exchange(
                        request,
                        route,
                        call,
                        urgency,
                        decision,
                        targets=self._targets,
                        record=record,
                    )
                    return await exchange.run()
        except TimeoutError:
            failure = self._out_of_time()
            if exchange is not None and exchange.committed:
                return await exchange.break_off(failure)
            record.outcome, error = failure.outcome, failure_error(failure)
        except UpstreamFailure as failure:
            record.outcome, error = failure.outcome, failure_error(failure)
            retry_after = failure.retry_after
        except ApiError as refusal:
            record.outcome, error = _outcome(refusal), refusal
        except Exception:
            if exchange is None or not exchange.committed:
                raise
            # An error response now would be a second one in the middle of the stream.
            log.exception("a stream of %s broke off", route.name)
            return await exchange.break_off(
                UpstreamFailure(Outcome.UPSTREAM_ERROR, OUR_FAULT, status=500, code="internal")
            )
        record.code = error.code
        headers = exchange.headers() if exchange is not None else None
        return error_response(error, headers, retry_after)

    async def _read(self, request: web.Request, route: Route, record: RequestRecord) -> Call:
        if self.in_flight.draining:
            raise _draining()
        if request.content_type != "application/json":
            # Also what keeps a web page from posting here without asking the browser first.
            raise InvalidRequestError("The Content-Type must be application/json.", status=415)
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise InvalidRequestError(
                "Compressed bodies are not taken; send plain JSON.", status=415
            )
        if (request.content_length or 0) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise _too_large(self._max_body_bytes) from None
        except web.RequestPayloadError:
            raise InvalidRequestError("The body broke off or is malformed.") from None
        record.bytes_in = len(body)
        call = await sized(len(body), route.read, body)
        record.stream = call.stream
        return call

    def _choose(self, call: Call, record: RequestRecord) -> Decision:
        began = time.perf_counter()
        infos = [_info(target) for target in self._targets.values()]
        decision = self._decide(call.view, call.model, infos, secrets.token_hex(8))
        self._metrics.decision_seconds.observe(time.perf_counter() - began)
        record.decision = decision.id
        record.rule = decision.rule
        record.complexity = decision.complexity.score
        return decision

    def _out_of_time(self) -> UpstreamFailure:
        if self.in_flight.cutting:
            return _draining()
        return UpstreamFailure(
            Outcome.TIMEOUT_TOTAL, f"The answer took longer than {TOTAL_SECONDS:g} s."
        )

    async def _list_models(self, _request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._entry(name) for name in self._names()]})

    async def _show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self._names():
            raise InvalidRequestError(
                "There is no such model; GET /v1/models lists them.",
                param="model",
                code="model_not_found",
                status=404,
            )
        return _json(self._entry(name))

    def _names(self) -> list[str]:
        tiers = sorted({target.tier for target in self._targets.values()}, reverse=True)
        return list(dict.fromkeys([AUTO, *tiers, *self._targets]))

    def _entry(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._opened, "owned_by": "tidegate"}

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _readyz(self, _request: web.Request) -> web.Response:
        targets = {
            target.name: {
                "tier": target.tier,
                "state": target.condition.state,
                "reason": target.condition.reason,
            }
            for target in self._targets.values()
        }
        if self.in_flight.draining:
            status = "draining"
        else:
            ready = any(target.condition.state == "ready" for target in self._targets.values())
            status = "ready" if ready else "not_ready"
        return _json({"status": status, "targets": targets}, 200 if status == "ready" else 503)

    async def _show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.render(), headers={"Content-Type": self._metrics.content_type}
        )


def _draining() -> UpstreamFailure:
    return UpstreamFailure(Outcome.DRAINING, "Tidegate is shutting down.")


def _too_large(limit: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The body is larger than {limit} bytes, this server's limit.",
        status=413,
        code="body_too_large",
    )


def _info(target: Target) -> TargetInfo:
    condition = target.condition
    return TargetInfo(
        name=target.name,
        tier=target.tier,
        ready=condition.state == "ready",
        capabilities=condition.capabilities,
        context_window=condition.context_window,
        # Clients learn the state; the whole reason may name files and is for /readyz.
        reason=f"it is {condition.state}",
    )


def _outcome(refusal: ApiError) -> Outcome:
    return Outcome.INVALID if refusal.status < 500 else Outcome.NO_TARGET


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )
