"""Spans by OpenTelemetry's SDK. Imported when tracing is on, and needs the extra `tracing`."""

import asyncio
import os
import socket
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SERVICE_VERSION,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from graftline import __version__
from graftline.tracing import Carrier, SpanKind, Value

_KINDS = {
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}
# A collector that is gone must not hold a process back when it stops.
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0
# Callers that leave are no errors of the program.
_LEAVING = (asyncio.CancelledError, GeneratorExit)


class OtelSpan:
    """See `tracing.Span`."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self.is_recording = span.is_recording()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """See `tracing.Span`."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, self._context())
        return tuple(carrier.items())

    def child(
        self,
        name: str,
        attributes: Mapping[str, Value] | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        start_ns: int | None = None,
    ) -> "OtelSpan":
        """See `tracing.Span`."""
        span = self._tracer.start_span(
            name, self._context(), kind=_KINDS[kind], attributes=attributes, start_time=start_ns
        )
        return OtelSpan(self._tracer, span)

    def set(self, attributes: Mapping[str, Value]) -> None:
        """See `tracing.Span`."""
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        """See `tracing.Span`."""
        if self._span.is_recording():
            self._span.add_event(name, attributes)

    def fail(self, reason: str) -> None:
        """See `tracing.Span`."""
        if self._span.is_recording():
            self._span.set_status(trace.StatusCode.ERROR, reason)

    def end(self, end_ns: int | None = None) -> None:
        """See `tracing.Span`."""
        if self._span.is_recording():
            self._span.end(end_ns)

    def __enter__(self) -> Self:
        """See `tracing.Span`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """See `tracing.Span`."""
        if isinstance(error, _LEAVING):
            self.set({"graftline.cancelled": True})
        elif error is not None:
            self.set({"error.type": type(error).__name__})
            self.fail(str(error))
        self.end()

    def _context(self) -> Context:
        return trace.set_span_in_context(self._span, Context())


class OtelTracer:
    """See `tracing.Tracer`.

    Args:
        processor: takes the spans that ended.
    """

    def __init__(self, service: str, processor: SpanProcessor) -> None:
        process = {
            SERVICE_NAME: service,
            SERVICE_VERSION: __version__,
            SERVICE_INSTANCE_ID: f"{socket.gethostname()}:{os.getpid()}",
        }
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word.
        resource = Resource.create(process).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("graftline", __version__)

    def start(self, name: str, carrier: Carrier = (), attributes: Mapping[str, Value] | None = None) -> OtelSpan:
        """See `tracing.Tracer`."""
        texts = {key.lower(): value for key, value in carrier if isinstance(value, str)}
        parent = propagate.extract(texts, Context())
        span = self._tracer.start_span(name, parent, kind=trace.SpanKind.SERVER, attributes=attributes)
        return OtelSpan(self._tracer, span)

    def close(self) -> None:
        """See `tracing.Tracer`."""
        # The SDK's own shutdown may take a timeout for every batch that waits.
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def exporting_tracer(service: str, endpoint: str) -> OtelTracer:
    """Sends spans in batches by OTLP over gRPC; its queue is bounded, and what finds it full is dropped."""
    return OtelTracer(service, BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)))
