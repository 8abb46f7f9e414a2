"""A load as a trace of OpenTelemetry, made of its report when it is done; nothing is imported where nobody listens.

    load ---+-- connect | plan | start | stream | ready      one after the other
                                          +-- rank 0, rank 1, ...

Spans go where the program's own go (a TracerProvider that it has set up), as children of the span that it is in. A
program that has none, as the command `longshore`, sends them by OTLP when the variables of OpenTelemetry say where to.
The report has lengths of time, of which spans are made backwards from now; ranks are taken to have been told together.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cluster.telemetry.metrics import model_label
from cluster.telemetry.report import LoadReport
from longshore.installation import __version__
from storage.errors import LongshoreError
from storage.problems import without_secrets

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NAME = "longshore"
FLUSH_MS = 5_000  # a collector that is not there costs a load no more than that
NS = 1_000_000_000

Span = tuple[str, float, float, dict[str, Any]]  # name, begin and end in seconds since the call, attributes


@contextlib.contextmanager
def load_trace(uri: str, started_s: float) -> Iterator[Callable[[LoadReport], None]]:
    """Around a load that was called at `started_s` (monotonic). The block hands its report over; an error of ours is
    told as the trace's. Never raises by itself.
    """
    reports: list[LoadReport] = []
    try:
        yield reports.append
    except LongshoreError as error:
        if tracing_wanted():
            with contextlib.suppress(Exception):
                _send("load", {"longshore.model": model_label(uri)}, time.monotonic() - started_s, (), error)
        raise
    if reports and tracing_wanted():
        with contextlib.suppress(Exception):
            report = reports[-1]
            _send("load", attributes_of(report), report.total_s, spans_of(report), None)


def tracing_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the program uses OpenTelemetry itself, or has an endpoint for traces and the packages."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if "opentelemetry.sdk.trace" in sys.modules:
        return True
    return any(environ.get(name) for name in ENDPOINTS) and importlib.util.find_spec("opentelemetry") is not None


def attributes_of(report: LoadReport) -> dict[str, Any]:
    """Return the attributes of the whole trace."""
    return {
        "longshore.model": model_label(report.uri),
        "longshore.model_id": report.model_id,
        "longshore.revision": report.revision,
        "longshore.verified": report.verified,
        "longshore.resident": report.resident,
        "longshore.placement": report.placement_mode,
        "longshore.attempts": report.attempts,
        "longshore.ranks": len(report.ranks),
        "longshore.placed_bytes": report.placed_bytes,
        "longshore.limit": report.limit.stage,
        **{f"longshore.bytes.{source}": size_bytes for source, size_bytes in report.bytes_by_source.items()},
        **{f"longshore.retries.{cause}": count for cause, count in report.retries.items()},
    }


def spans_of(report: LoadReport) -> tuple[Span, ...]:
    """Phases, then ranks; all within [0, total_s]. None of a model that was resident."""
    if report.resident:
        return ()
    spans: list[Span] = []
    at_s = 0.0
    lengths_s = {
        "connect": report.connect_s,
        "plan": report.plan_s,
        "start": report.start_s,
        "stream": report.load_s,
        "ready": report.ready_after_last_byte_s,
    }
    stream = 0.0, 0.0
    for name, length_s in lengths_s.items():
        end_s = min(at_s + max(0.0, length_s), report.total_s)
        spans.append((name, at_s, end_s, {}))
        stream = (at_s, end_s) if name == "stream" else stream
        at_s = end_s
    job_sent_s = stream[0] - min((rank.start_s for rank in report.ranks), default=0.0)
    for rank in report.ranks:
        begin_s = (
            job_sent_s + rank.start_s if not rank.incarnation else stream[1] - rank.load_s
        )  # a replacement is told later
        begin_s = min(max(begin_s, stream[0]), stream[1])
        about = {
            "longshore.rank": rank.rank,
            "longshore.host": rank.host,
            "longshore.device": rank.device,
            "longshore.incarnation": rank.incarnation,
            "longshore.size_bytes": rank.size_bytes,
            "longshore.requests": rank.requests,
            "longshore.throttles": rank.throttles,
            **{f"longshore.{name}": value for name, value in rank.stages.as_dict().items() if name.endswith("_s")},
        }
        spans.append((f"rank {rank.rank}", begin_s, min(begin_s + rank.load_s, stream[1]), about))
    return tuple(spans)


def _send(
    name: str, attributes: dict[str, Any], total_s: float, spans: tuple[Span, ...], error: LongshoreError | None
) -> None:
    from opentelemetry import trace

    provider, own = _provider()
    tracer = provider.get_tracer(NAME, __version__)
    ended_ns = time.time_ns()
    begun_ns = ended_ns - int(total_s * NS)
    whole = tracer.start_span(name, start_time=begun_ns, attributes=attributes)
    if error is not None:
        whole.set_attribute("error.type", type(error).__name__)
        whole.set_status(trace.StatusCode.ERROR, without_secrets(str(error))[:500])
    inside = trace.set_span_in_context(whole)
    for child, begin_s, end_s, about in spans:
        span = tracer.start_span(child, context=inside, start_time=begun_ns + int(begin_s * NS), attributes=about)
        if child == "stream":
            streaming = trace.set_span_in_context(span)
        span.end(begun_ns + int(end_s * NS))
        inside = streaming if child == "ready" else inside  # what follows are ranks
    whole.end(ended_ns)
    if own:
        provider.force_flush(FLUSH_MS)


_OWN: list[Any] = []


def _provider() -> tuple[Any, bool]:
    """The program's TracerProvider; else, told where to send, one of our own."""
    from opentelemetry import trace

    found = trace.get_tracer_provider()
    if not isinstance(found, trace.ProxyTracerProvider) or not any(os.environ.get(name) for name in ENDPOINTS):
        return found, False
    if not _OWN:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", NAME)})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        _OWN.append(provider)
    return _OWN[0], True
