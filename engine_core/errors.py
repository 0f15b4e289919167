"""Errors that tell the user what to do, and their OpenAI wire shape."""

from typing import Any


class TidegateError(Exception):
    """Base of every error that a person may read; the message says what to do next."""


class ModelError(TidegateError):
    """A model cannot be had, read or built."""


class StepMemoryError(Exception):
    """A step needs more memory than its cap allows; nothing else is broken, a smaller one may fit."""


class ApiError(TidegateError):
    """An error with an HTTP status and OpenAI's error body.

    Args:
        message: One sentence for the client's developer.
        status: HTTP status code.
        type: OpenAI's `error.type`, e.g. `invalid_request_error`.
        code: Machine-readable reason, e.g. `model_not_found`.
        param: The offending request field, dotted path.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str,  # noqa: A002 - OpenAI's field name
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the JSON body that OpenAI clients parse."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequestError(ApiError):
    """The client's request is wrong: 400, or the status given (404, 413, 415)."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(
            message, status=status, type="invalid_request_error", code=code, param=param
        )


class OverloadedError(ApiError):
    """No room now; the client may try again: 503 with a machine-readable code."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, status=503, type="overloaded_error", code=code)


class DeadlineError(ApiError):
    """The client's own deadline has passed: 504."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=504, type="timeout_error", code="deadline")


class EngineFailureError(ApiError):
    """The engine itself broke while serving a valid request: 500."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500, type="server_error", code="engine_error")
