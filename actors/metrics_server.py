"""An HTTP server for Prometheus, in a thread of the coordinator's process.

    scrape --> thread: asks the coordinator's loop for a snapshot of its metrics --> samples, text --> answer

The loop makes copies and nothing else. A loop that is busy for longer than a scraper waits gets an empty 503, and
Prometheus shows the target as down. A port that is taken costs the port, not the coordinator.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.config import Config
from cluster.telemetry.counters import ClusterMetrics, CoordinatorFacts, Durations, Sample, Snapshot, samples
from cluster.telemetry.metrics import BUCKETS_S, FAMILIES, Family, Kind
from longshore.installation import __version__
from storage.host.memory import own_bytes

OFF = -1
SNAPSHOT_S = 5.0  # a loop that takes longer to make one is not well
CLIENT_S = 10.0  # a scraper that sends nothing for so long is left
_LOG = logging.getLogger("longshore.metrics")


class MetricsServer:
    """Serves `/metrics` until `close`; without a URL when it is off, or nobody can listen there."""

    def __init__(self, config: Config, metrics: ClusterMetrics) -> None:
        self.url = ""
        self._host, self._port = config.metrics_host, config.metrics_port
        self._metrics = metrics
        self._server: WSGIServer | None = None

    def start(self) -> None:
        """Start serving; called in the coordinator's loop, which makes the snapshots. Again, it changes nothing."""
        if self._server is not None or self._port == OFF:
            return
        registry = CollectorRegistry(auto_describe=False)
        registry.register(PageCollector(_in_loop(asyncio.get_running_loop(), self._metrics.snapshot)))
        app = _answering(make_wsgi_app(registry))
        for port in dict.fromkeys((self._port, 0)):
            if self._server is None:
                try:
                    self._server = _listen(self._host, port, app)
                except OSError as error:
                    _LOG.warning("metrics cannot be served at %s port %d: %s", self._host, port, error)
        if self._server is None:
            self._port = OFF
            return
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        shown = socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"http://{shown}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        server, self._server, self.url, self._port = self._server, None, "", OFF
        if server is not None:
            server.shutdown()
            server.server_close()


class PageCollector(Collector):
    """The collector that prometheus-client asks at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._host = socket.gethostname()

    def collect(self) -> Iterable[Metric]:
        snapshot, myself = self._snapshot(), CoordinatorFacts(self._host, __version__, own_bytes())
        for family, found in samples(snapshot, time.monotonic(), myself).items():
            yield _metric(family, found)

    def describe(self) -> Iterable[Metric]:
        """Return all metrics without series, so that a scrape can ask for some by `?name[]=`. Asks no coordinator."""
        return [_metric(family, ()) for family in FAMILIES]


def _metric(family: Family, found: Iterable[Sample]) -> Metric:
    made: Any
    if family.kind is Kind.HISTOGRAM:
        made = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    elif family.kind is Kind.COUNTER:
        made = CounterMetricFamily(family.name, family.help, labels=family.labels)
    else:
        made = GaugeMetricFamily(family.name, family.help, labels=family.labels)
    for sample in found:
        if isinstance(sample.value, Durations):
            made.add_metric(sample.labels, list(_buckets(sample.value)), sample.value.sum_s)
        else:
            made.add_metric(sample.labels, sample.value)
    metric: Metric = made
    return metric


def _buckets(durations: Durations) -> Iterator[tuple[str, float]]:
    """Cumulative, as Prometheus has them."""
    below = 0
    for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), durations.counts, strict=True):
        below += count
        yield bound, below


def _in_loop(loop: asyncio.AbstractEventLoop, snapshot: Callable[[], Snapshot]) -> Callable[[], Snapshot]:
    async def ask() -> Snapshot:
        return snapshot()

    return lambda: asyncio.run_coroutine_threadsafe(ask(), loop).result(SNAPSHOT_S)


def _answering(app: Any) -> Any:
    """Wrap the app: 503 when the loop does not answer, 404 for any other path."""

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ.get("PATH_INFO") not in ("/metrics", "/metrics/"):
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"see /metrics\n"]
        try:
            found: Iterable[bytes] = app(environ, start_response)
            return found
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError, RuntimeError):
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the coordinator is busy\n"]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without the look-up of a name that http.server makes: it can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line per scrape would be noise."""


def _listen(host: str, port: int, app: Any) -> WSGIServer:
    """Return a listening server. Raises OSError when nobody can listen there."""
    return make_server(host, port, app, _Server6 if ":" in host else _Server, handler_class=_Handler)
