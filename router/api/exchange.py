"""Sends one request to its candidates in order until one answers.

Before the first content byte (the commit) a failure moves on to the next candidate, unseen by the
client; after it the target never changes.
"""

import contextlib
import logging
import time
from collections.abc import Mapping

from aiohttp import web

from engine_core.urgency import Urgency
from router.api.call import Call, Route
from router.api.errors import error_event, failure_error
from router.decide.decision import Decision
from router.guard.outcomes import Outcome, UpstreamFailure
from router.observe.record import RequestRecord
from router.targets.off_loop import sized
from router.targets.target import Target

log = logging.getLogger("tidegate.request")


class Exchange:
    """One request from its decision to its answer.

    Args:
        request: The client's.
        route: The endpoint it came in on.
        call: What it asks for.
        urgency: How much it matters and until when; targets are told.
        decision: Whom to ask, in order.
        targets: All targets by name.
        record: Kept true for metrics and log.
    """

    def __init__(
        self,
        request: web.Request,
        route: Route,
        call: Call,
        urgency: Urgency,
        decision: Decision,
        *,
        targets: Mapping[str, Target],
        record: RequestRecord,
    ) -> None:
        self._request = request
        self._route = route
        self._call = call
        self._urgency = urgency
        self._decision = decision
        self._targets = targets
        self._record = record
        self._response: web.StreamResponse | None = None

    @property
    def committed(self) -> bool:
        """Whether a stream's status and first content have gone to the client."""
        return self._response is not None

    def headers(self) -> dict[str, str]:
        """Return the headers that say who answered and why; true at the time of the call."""
        record = self._record
        headers = {
            "x-tidegate-tier": record.tier,
            "x-tidegate-target": header_text(record.target),
            "x-tidegate-complexity": f"{self._decision.complexity.score:.2f}",
            "x-tidegate-rule": header_text(record.rule),
            "x-tidegate-decision": record.decision,
        }
        if record.failovers:
            first, outcome = record.failovers[0]
            headers["x-tidegate-failover"] = f"{header_text(first)}:{outcome.value}"
        return headers

    async def run(self) -> web.StreamResponse:
        """Answer the client.

        Returns:
            The finished response; if its stream broke off after the commit, the record tells.

        Raises:
            UpstreamFailure: no candidate answered and nothing has been sent.
        """
        failures: list[tuple[Target, UpstreamFailure]] = []
        for name in self._decision.chosen:
            if self._urgency.deadline is not None and time.monotonic() >= self._urgency.deadline:
                raise UpstreamFailure(Outcome.DEADLINE, "The request's deadline has passed.")
            self._note_failover(failures)
            target = self._targets[name]
            self._blame(target)
            try:
                if self._call.stream:
                    return await self._stream(target)
                return await self._fetch(target)
            except UpstreamFailure as failure:
                failures.append((target, failure))
                self._log_failure(failure)
                if not failure.may_fail_over:
                    break
        if not failures:
            raise UpstreamFailure(Outcome.NO_TARGET, self._why_nobody())
        # The first cause, but a failure that may pass hides a refusal that is for good: the
        # client should try again, since the target that refused was not the only choice.
        target, cause = next(
            (f for f in failures if f[1].outcome is not Outcome.INVALID), failures[0]
        )
        self._blame(target)
        raise cause

    async def break_off(self, failure: UpstreamFailure) -> web.StreamResponse:
        """End a committed stream with an error event; never with `[DONE]`."""
        if self._response is None:
            raise RuntimeError("a response that was not committed cannot break off")
        self._record.outcome = failure.outcome
        self._record.code = failure.code
        with contextlib.suppress(ConnectionError):
            await self._write(self._response, error_event(failure_error(failure)))
        return self._response

    async def _fetch(self, target: Target) -> web.Response:
        body = await self._body_for(target)
        urgency = self._urgency.headers(time.monotonic())
        answer = await target.client.fetch(self._route.path, body, self._call.choices, urgency)
        self._record.bytes_out = len(answer)
        return web.Response(body=answer, content_type="application/json", headers=self.headers())

    async def _stream(self, target: Target) -> web.StreamResponse:
        body = await self._body_for(target)
        urgency = self._urgency.headers(time.monotonic())
        pieces = target.client.stream(self._route.path, body, self._call.choices, urgency)
        async with contextlib.aclosing(pieces):
            first = await anext(pieces)
            self._record.first_token = time.monotonic()
            response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream; charset=utf-8",
                    "Cache-Control": "no-store",
                    "X-Accel-Buffering": "no",  # or nginx in front collects the stream
                    **self.headers(),
                }
            )
            self._response = response
            try:
                await response.prepare(self._request)
                await self._write(response, first)
                async for piece in pieces:
                    await self._write(response, piece)
            except UpstreamFailure as failure:
                return await self.break_off(failure)
            except ConnectionError:
                self._record.outcome = Outcome.CLIENT_CLOSED
        return response

    async def _body_for(self, target: Target) -> bytes:
        model = target.condition.model
        return await sized(self._record.bytes_in, self._call.body_for, model)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        await response.write(data)
        self._record.bytes_out += len(data)

    def _note_failover(self, failures: list[tuple[Target, UpstreamFailure]]) -> None:
        if failures:
            given_up, failure = failures[-1]
            self._record.failovers.append((given_up.name, failure.outcome))

    def _log_failure(self, failure: UpstreamFailure) -> None:
        """Tell the operator what went wrong, which a failover hides from the client."""
        # A refusal's sentence is the upstream's and may repeat the request.
        if failure.outcome is not Outcome.INVALID:
            log.warning(
                "decision=%s target=%s failed: %s",
                self._record.decision,
                self._record.target,
                failure.message,
            )

    def _blame(self, target: Target) -> None:
        self._record.target, self._record.tier = target.name, target.tier

    def _why_nobody(self) -> str:
        why = "; ".join(
            f"{candidate.target}: {candidate.passed_over}"
            for candidate in self._decision.candidates
        )
        return f"No target can answer now ({why})."


def header_text(text: str) -> str:
    """Return text from the configuration as a header value: printable ASCII, the rest as `?`."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text)
