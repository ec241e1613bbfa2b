"""Typed errors in OpenAI's shape."""

import math
from typing import Any

from graftline.errors import (
    CancelledRequestError,
    GraftlineError,
    InvalidRequestError,
    OutOfCapacityError,
    PeerUnavailableError,
    PromptTooLongError,
    UnauthenticatedError,
)
from graftline.router.model import UnknownModelError

# HTTP status and OpenAI's `type`, by class; anything else is a fault of the server.
_TABLE: dict[type[GraftlineError], tuple[int, str]] = {
    InvalidRequestError: (400, "invalid_request_error"),
    UnauthenticatedError: (401, "authentication_error"),
    OutOfCapacityError: (429, "rate_limit_error"),
    PeerUnavailableError: (503, "service_unavailable_error"),
    CancelledRequestError: (504, "timeout_error"),
}

# OpenAI's `code`, where clients act on one: agents shorten a conversation that has become too long.
_CODES: dict[type[GraftlineError], str] = {
    UnknownModelError: "model_not_found",
    PromptTooLongError: "context_length_exceeded",
}


def http_status(error: GraftlineError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, UnknownModelError):
        return 404
    return _kind(error)[0]


def error_body(error: GraftlineError) -> dict[str, Any]:
    """The JSON body of an error."""
    return {
        "error": {
            "message": str(error) or type(error).__name__,
            "type": _kind(error)[1],
            "param": error.field if isinstance(error, InvalidRequestError) else None,
            "code": next((code for kind, code in _CODES.items() if isinstance(error, kind)), None),
        }
    }


def error_headers(error: GraftlineError) -> dict[str, str]:
    """Headers that go with an error."""
    if isinstance(error, OutOfCapacityError) and error.retry_after_s is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, UnauthenticatedError):
        return {"www-authenticate": "Bearer"}
    return {}


def _kind(error: GraftlineError) -> tuple[int, str]:
    return next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), (500, "server_error"))
