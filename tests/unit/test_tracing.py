"""A load as a trace: spans within each other, where the program's own go, or nowhere at all."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ChunkFailed
from cluster.layouts.mesh import Layout
from cluster.telemetry import tracing
from cluster.telemetry.report import LoadReport, NodeReport
from cluster.telemetry.stats import RankReport, StageTimes
from cluster.telemetry.tracing import load_trace, spans_of, tracing_wanted

REPOSITORY = Path(__file__).parents[2]
NODE = NodeReport("n", "host", 2, 200, 2, 200, 0, 0, 0, 0, {"reset": 1})


def rank_report(number: int, start_s: float, load_s: float, incarnation: int = 0) -> RankReport:
    stages = StageTimes(fetch_s=0.5)
    return RankReport(number, "n", "host", 1, "cpu", incarnation, 100, 128, stages, 0, start_s, load_s)


def load_report(*ranks: RankReport, plan_s: float = 1.0, load_s: float = 3.0, total_s: float = 7.0) -> LoadReport:
    return LoadReport(
        "llama-1",
        "s3://b/llama?token=s3cr3t",
        "r",
        "blake3",
        "via_arena",
        False,
        Layout(2),
        200,
        200,
        0,
        plan_s,
        0.5,
        load_s,
        total_s,
        1,
        ranks,
        (NODE,),
        connect_s=0.25,
        first_byte_s=1.75,
        ready_after_last_byte_s=0.5,
    )


RANKS = rank_report(0, 0.2, 2.0), rank_report(1, 0.4, 2.5), rank_report(2, 0.1, 1.0, incarnation=1)


def test_phases_follow_each_other_and_ranks_lie_in_the_stream() -> None:
    spans = {name: (begin_s, end_s) for name, begin_s, end_s, _ in spans_of(load_report(*RANKS))}
    assert spans["connect"] == (0, 0.25)
    assert spans["plan"] == (0.25, 1.25)
    assert spans["start"] == (1.25, 1.75)
    assert spans["stream"] == (1.75, 4.75)
    assert spans["ready"] == (4.75, 5.25)
    assert spans["rank 0"] == (pytest.approx(1.85), pytest.approx(3.85))
    assert spans["rank 1"] == (pytest.approx(2.05), pytest.approx(4.55))
    assert spans["rank 2"] == (pytest.approx(3.75), 4.75)  # a replacement: it received the load later


seconds = st.floats(0, 1e4)


@given(st.lists(st.tuples(seconds, seconds, st.integers(0, 1)), max_size=4), seconds, seconds, seconds)
def test_spans_lie_inside_their_parents(
    ranks: list[tuple[float, float, int]], plan_s: float, load_s: float, total_s: float
) -> None:
    made = [rank_report(number, *lengths) for number, lengths in enumerate(ranks)]
    spans = spans_of(load_report(*made, plan_s=plan_s, load_s=load_s, total_s=total_s))
    within = {name: (begin_s, end_s) for name, begin_s, end_s, _ in spans}
    for name, begin_s, end_s, _ in spans:
        low, high = within["stream"] if name.startswith("rank") else (0.0, total_s)
        assert low <= begin_s <= end_s <= high


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Spans that the program's own provider was given."""
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return provider, exporter


def test_spans_use_the_programs_own_exporter(exported: Any) -> None:
    provider, exporter = exported
    with provider.get_tracer("app").start_as_current_span("request") as request:  # noqa: SIM117
        with load_trace("s3://b/llama", time.monotonic()) as done:
            done(load_report(*RANKS))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    whole = spans["load"]
    assert whole.parent.span_id == request.get_span_context().span_id
    assert {spans[name].parent.span_id for name in ("connect", "plan", "start", "stream", "ready")} == {
        whole.context.span_id
    }
    assert {spans[f"rank {n}"].parent.span_id for n in range(3)} == {spans["stream"].context.span_id}
    assert whole.end_time - whole.start_time == pytest.approx(7e9, abs=1e4)
    assert whole.attributes["longshore.bytes.store_via_arena"] == 200
    assert whole.attributes["longshore.retries.reset"] == 1
    assert spans["rank 1"].attributes["longshore.fetch_s"] == 0.5
    assert "s3cr3t" not in str([span.to_json() for span in spans.values()])


def test_a_load_that_fails_is_a_trace_with_its_error(exported: Any) -> None:
    _, exporter = exported
    error = ChunkFailed("no such bucket, password=s3cr3t", chunk=3)
    with pytest.raises(ChunkFailed), load_trace("s3://me:s3cr3t@b/llama", time.monotonic() - 2):
        raise error
    (span,) = exporter.get_finished_spans()
    assert span.attributes["error.type"] == "ChunkFailed"
    assert not span.status.is_ok
    assert "s3cr3t" not in span.to_json()
    assert span.end_time - span.start_time >= 2e9


def test_a_model_that_was_resident_has_one_span(exported: Any) -> None:
    _, exporter = exported
    with load_trace("s3://b/llama", time.monotonic()) as done:
        done(load_report(*RANKS).as_seen(0.1, 0.1, shared=True, waited=False))
    assert [span.name for span in exporter.get_finished_spans()] == ["load"]


def test_tracing_errors_do_not_fail_a_load(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_send", lambda *_: 1 / 0)
    with load_trace("s3://b/llama", time.monotonic()) as done:
        done(load_report())
    with pytest.raises(ChunkFailed), load_trace("s3://b/llama", time.monotonic()):
        raise ChunkFailed("x")


def test_no_spans_are_made_when_tracing_is_off() -> None:
    assert not tracing_wanted({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"})
    with load_trace("s3://b/llama", time.monotonic()):
        pass  # no report, so no spans


NOBODY = """
import importlib.util, os, sys, time
from cluster.telemetry.tracing import load_trace, tracing_wanted
{first}
assert not tracing_wanted()
with load_trace("s3://b/llama", time.monotonic()) as done:
    done(None)
assert not any(name.startswith("opentelemetry.") for name in sys.modules), "imported"
"""


@pytest.mark.parametrize(
    "first",
    [
        "",
        "sys.modules['opentelemetry'] = None",
        f"os.environ['{tracing.ENDPOINTS[0]}'] = 'http://x'; importlib.util.find_spec = lambda _: None",
    ],
    ids=["nobody asks", "not there", "asked for, and not there"],
)
def test_opentelemetry_is_not_imported_without_a_listener(first: str) -> None:
    subprocess.run([sys.executable, "-c", NOBODY.format(first=first)], check=True, cwd=REPOSITORY, timeout=120)


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP collector that keeps what it is sent."""
    sent: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


SENDS = """
import sys, time
from cluster.telemetry.tracing import load_trace
from tests.unit.test_tracing import RANKS, load_report
with load_trace("s3://b/llama", time.monotonic()) as done:
    done(load_report(*RANKS))
"""


def test_a_program_without_a_tracer_uses_the_configured_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    with collector() as (url, sent):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
        subprocess.run([sys.executable, "-c", SENDS], check=True, cwd=REPOSITORY, timeout=120)
    (request,) = [messages.ExportTraceServiceRequest.FromString(body) for body in sent]
    spans = [span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == [
        *("connect", "load", "plan"),
        *("rank 0", "rank 1", "rank 2"),
        *("ready", "start", "stream"),
    ]
    assert len({span.trace_id for span in spans}) == 1
    service = {item.key: item.value.string_value for item in request.resource_spans[0].resource.attributes}
    assert service["service.name"] == "nightly"
