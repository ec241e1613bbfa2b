"""Spans of requests: what the rest of the program sees of tracing. Off unless an exporter is named.

Knows no OpenTelemetry: `open_tracer` imports it when tracing is on (`graftline.otel`), and when it is off every span
is one shared object that does nothing. Spans are passed along as arguments, never found through global state.
"""

import os
import time
from collections.abc import Iterable, Mapping
from enum import Enum
from types import TracebackType
from typing import Protocol, Self

from graftline.errors import InvalidRequestError

Value = str | int | float | bool
# Keys and values of call metadata or HTTP headers.
Carrier = Iterable[tuple[str, str | bytes]]
# The first of these that is set says where spans go, unless the command line does.
ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT_VARIABLES = (ENDPOINT_VARIABLE, "OTEL_EXPORTER_OTLP_ENDPOINT")


class SpanKind(Enum):
    """Which side of a call a span is."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Span(Protocol):
    """Something that takes time; once it has ended, nothing changes it. As a context manager it ends with its block and
    keeps the error the block raised.
    """

    @property
    def is_recording(self) -> bool:
        """Whether anybody will see it, ended or not: attributes need not be computed for nobody."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Call metadata that makes spans of the callee children of this one; empty when tracing is off."""

    def child(
        self,
        name: str,
        attributes: Mapping[str, Value] | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        start_ns: int | None = None,
    ) -> "Span":
        """A part of it, begun now or at `start_ns` (Unix time)."""

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Adds attributes."""

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        """Something happened now."""

    def fail(self, reason: str) -> None:
        """It went wrong."""

    def end(self, end_ns: int | None = None) -> None:
        """It is over, now or since `end_ns`; a second call has no effect."""

    def __enter__(self) -> Self:
        """The span itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Fails with `error` if there is one, and ends."""


class Tracer(Protocol):
    """Where traces begin in this process."""

    def start(self, name: str, carrier: Carrier = (), attributes: Mapping[str, Value] | None = None) -> Span:
        """A span for a call that came in; its parent is the caller's span if the carrier names one."""

    def close(self) -> None:
        """Sends what still waits, for a bounded time."""


class _NoSpan:
    is_recording = False
    metadata: tuple[tuple[str, str], ...] = ()

    def child(
        self,
        name: str,
        attributes: Mapping[str, Value] | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        start_ns: int | None = None,
    ) -> "_NoSpan":
        return self

    def set(self, attributes: Mapping[str, Value]) -> None:
        return

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        return

    def fail(self, reason: str) -> None:
        return

    def end(self, end_ns: int | None = None) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return


class _NoTracer:
    def start(self, name: str, carrier: Carrier = (), attributes: Mapping[str, Value] | None = None) -> Span:
        return NO_SPAN

    def close(self) -> None:
        return


NO_SPAN: Span = _NoSpan()
NO_TRACER: Tracer = _NoTracer()


def now_ns() -> int:
    """Unix time, as spans count it."""
    return time.time_ns()


def configured_endpoint(given: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Where spans go: the endpoint given, else what OpenTelemetry's own variables name; None: tracing is off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if given:
        return given
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in {"", "otlp"}:
        return None
    return next((environment[name] for name in ENDPOINT_VARIABLES if environment.get(name)), None)


def open_tracer(service: str, endpoint: str | None) -> Tracer:
    """A tracer that exports to `endpoint` (http://host:4317, OTLP over gRPC); one that does nothing for None.

    Args:
        service: the name the process has in traces, unless OTEL_SERVICE_NAME gives another.

    Raises:
        InvalidRequestError: the endpoint is no URL, or OpenTelemetry is not installed.
    """
    if endpoint is None:
        return NO_TRACER
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidRequestError("otlp_endpoint", f"{endpoint!r} is no http:// or https:// URL")
    try:
        from graftline.otel import exporting_tracer
    except ModuleNotFoundError as error:
        problem = f"{endpoint!r} needs {error.name}: pip install 'graftline[tracing]'"
        raise InvalidRequestError("otlp_endpoint", problem) from error
    return exporting_tracer(service, endpoint)
