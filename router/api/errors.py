"""Every error of the door in OpenAI's shape, whatever raised it.

Only bytes that are no HTTP request are answered, with a plain 400, by aiohttp itself.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from engine_core.errors import ApiError, InvalidRequestError
from router.guard.outcomes import UpstreamFailure

log = logging.getLogger("tidegate.api")

OUR_FAULT = "Tidegate failed; its log says why."

PATHS = (
    "POST /v1/chat/completions and /v1/completions, and GET /v1/models, /v1/models/{model}, "
    "/healthz, /readyz and /metrics"
)
"""What the door answers, for whoever knocks elsewhere."""

RETRY_AFTER_SECONDS = 2
"""Asked of clients when nobody knows better: about what a restarted engine needs."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def failure_error(failure: UpstreamFailure) -> ApiError:
    """Return the error that tells a client of a failure."""
    return ApiError(
        failure.message,
        status=failure.status,
        type=failure.type(),
        code=failure.code,
        param=failure.param,
    )


def error_response(
    error: ApiError, headers: Mapping[str, str] | None = None, retry_after: int | None = None
) -> web.Response:
    """Render an error; every 503 says when to come back (seconds)."""
    response = web.Response(
        body=msgspec.json.encode(error.body()),
        status=error.status,
        content_type="application/json",
        headers=headers,
    )
    if error.status == 503:
        response.headers["Retry-After"] = str(retry_after or RETRY_AFTER_SECONDS)
    return response


def error_event(error: ApiError) -> bytes:
    """Render an error as the last event of a stream whose status is already sent."""
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n"


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what a handler raises into a JSON error; nothing of the request is echoed."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        response = error_response(_http_error(request, error))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except Exception:
        log.exception("%s %s failed", request.method, request.match_info.route.resource)
        return error_response(ApiError(OUR_FAULT, status=500, type="server_error", code="internal"))


def _http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        return InvalidRequestError(
            f"Tidegate does not offer this path; it has {PATHS}.", status=404, code="not_found"
        )
    if error.status == 405:
        return InvalidRequestError(
            f"This path does not take {request.method}.", status=405, code="method_not_allowed"
        )
    return ApiError(error.reason, status=error.status, type="invalid_request_error")


async def hide_banner(_request: web.Request, response: web.StreamResponse) -> None:
    """Remove the server's name and version from an answer (an `on_response_prepare` hook)."""
    response.headers.pop("Server", None)
