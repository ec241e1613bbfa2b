"""Tracing is off unless asked for, costs next to nothing then, and cannot hold a process back."""

import subprocess
import sys
import time
from types import MappingProxyType

import pytest
from trace_collector import MemoryTraces, is_child, running_collector

from graftline import otel
from graftline.errors import InvalidRequestError
from graftline.tracing import NO_SPAN, NO_TRACER, configured_endpoint, now_ns, open_tracer

GIVEN, GENERAL, TRACES = "http://given:1", "http://general:1", "http://traces:1"


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, {}, None),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        (GIVEN, {}, GIVEN),
        (GIVEN, {"OTEL_EXPORTER_OTLP_ENDPOINT": GENERAL}, GIVEN),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": GENERAL}, GENERAL),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": GENERAL, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": TRACES}, TRACES),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": GENERAL, "OTEL_TRACES_EXPORTER": "none"}, None),
        (GIVEN, {"OTEL_SDK_DISABLED": "TRUE"}, None),
    ],
)
def test_what_turns_it_on(given: str | None, environment: dict[str, str], expected: str | None) -> None:
    assert configured_endpoint(given, MappingProxyType(environment)) == expected


def test_off_imports_nothing_and_hands_out_one_span() -> None:
    code = (
        "import sys\n"
        "import graftline.router.server\n"
        "from graftline.tracing import NO_TRACER, open_tracer\n"
        "assert open_tracer('x', None) is NO_TRACER\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    span = NO_TRACER.start("request")
    assert span is NO_SPAN
    assert span.child("part", {"a": 1}) is NO_SPAN
    assert span.metadata == ()
    with pytest.raises(ValueError, match="kept"), span:
        raise ValueError("kept")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidRequestError, match="otlp_endpoint"):
        open_tracer("x", endpoint)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "graftline.otel", None)
    with pytest.raises(InvalidRequestError, match=r"graftline\[tracing\]"):
        open_tracer("x", "http://127.0.0.1:4317")


def test_a_callers_context_goes_on() -> None:
    traces = MemoryTraces()
    caller = f"00-{'ab' * 16}-{'cd' * 8}-01"
    with traces.tracer.start("served", [("TraceParent", caller), ("other-bin", b"\x00")]) as span:
        ((key, value),) = span.metadata
    served = traces.one("served")
    assert served.context is not None
    assert (key, value) == ("traceparent", f"00-{'ab' * 16}-{served.context.span_id:016x}-01")
    assert served.parent is not None
    assert served.parent.span_id == int("cd" * 8, 16)


def test_an_unsampled_call_stays_unsampled() -> None:
    traces = MemoryTraces()
    with traces.tracer.start("served", [("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-00")]) as span:
        assert not span.is_recording
        assert span.metadata[0][1].endswith("-00")
        span.child("part").end()
    assert not traces.named("served")
    assert not traces.named("part")


def test_spans_keep_errors_and_nothing_changes_after_their_end() -> None:
    traces = MemoryTraces()
    with traces.tracer.start("outer") as outer:
        with pytest.raises(ValueError, match="broke"), outer.child("part", start_ns=now_ns() - 10**9) as part:
            raise ValueError("broke")
        part.set({"late": True})
        part.fail("late")
        part.end()
    ended = traces.one("part")
    assert is_child(ended, traces.one("outer"))
    assert ended.attributes == {"error.type": "ValueError"}
    assert ended.status.description == "broke"
    assert ended.start_time is not None
    assert ended.end_time is not None
    assert ended.end_time - ended.start_time >= 10**9


def test_the_environment_has_the_last_word_on_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    with running_collector() as collector:
        tracer = open_tracer("graftline-router", collector.address)
        tracer.start("x").end()
        tracer.close()
    (span,) = collector.spans
    assert span.service == "chat"


def test_a_collector_that_is_gone_holds_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "CLOSE_TIMEOUT_S", 0.5)
    tracer = open_tracer("x", "http://127.0.0.1:9")
    for _ in range(2000):
        tracer.start("span").end()
    begin_s = time.monotonic()
    tracer.close()
    assert time.monotonic() - begin_s < 3
