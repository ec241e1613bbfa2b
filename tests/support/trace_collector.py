"""Where spans go in tests: a collector that answers OpenTelemetry's own gRPC service, or this process's memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from graftline.otel import OtelTracer


@dataclass(frozen=True)
class Collected:
    """A span as its process exported it; ids are hex, empty for none."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]


@dataclass
class Collector(pb2_grpc.TraceServiceServicer):
    """Keeps every span it is sent."""

    address: str = ""
    spans: list[Collected] = field(default_factory=list)

    def Export(self, request: Any, context: Any) -> Any:
        for of_resource in request.resource_spans:
            resource = values(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans += [collected(resource["service.name"], span) for span in scope.spans]
        return pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[Collected]:
        return [span for span in self.spans if span.trace_id == trace_id]


def values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def collected(service: str, span: Any) -> Collected:
    return Collected(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=values(span.attributes),
    )


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0)


class MemoryTraces:
    """A tracer of this process, and what it has seen end."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = OtelTracer("test", SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and parent.context is not None and span.parent.span_id == parent.context.span_id
