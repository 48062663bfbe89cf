"""Metrics are served, whoever else connects to their port."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Gauge

from kvrelay.net.door_rules import METRICS
from kvrelay.observe.metrics_server import MetricsServer

SECONDS = 60.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("answer", "To everything", registry=registry).set(42)
    server = MetricsServer(registry, "127.0.0.1", 0, METRICS)
    yield server
    server.close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)


def scrape(server: MetricsServer, **headers: str) -> tuple[bytes, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return response.read(), response.headers["Content-Type"]


def is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_scrape(server: MetricsServer):
    body, kind = scrape(server)
    assert b"answer 42.0" in body.splitlines()
    assert kind.startswith("text/plain")
    body, kind = scrape(server, Accept="application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    assert kind.startswith("application/openmetrics-text")
    body, _ = scrape(server, **{"Accept-Encoding": "gzip"})
    assert b"answer 42.0" in gzip.decompress(body)


def test_a_page_beside_the_metrics():
    server = MetricsServer(
        CollectorRegistry(), "127.0.0.1", 0, METRICS, {"/page": lambda host: f'["{host}"]'.encode()}
    )
    url = f"http://127.0.0.1:{server.port}/page?ignored=1"
    with contextlib.closing(server), urllib.request.urlopen(url) as answer:
        assert answer.headers["content-type"] == "application/json"
        assert answer.read() == f'["127.0.0.1:{server.port}"]'.encode()


def test_other_methods_are_refused(server: MetricsServer):
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/", b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=SECONDS)
    with caught.value as refused:
        assert refused.code == 405


@pytest.mark.parametrize(
    "garbage",
    [b"\r\n\r\n", b"\x16\x03\x01\x02\r\n\r\n", b"GET\r\n\r\n", bytes(range(256)) * 256],
    ids=["empty", "TLS", "half a line", "endless"],
)
def test_garbage_is_hung_up_on(server: MetricsServer, garbage: bytes):
    with connect(server) as connection:
        connection.sendall(garbage)
        assert is_ended(connection)
    assert b"answer 42.0" in scrape(server)[0]


def test_silent_connections_keep_nobody_out(server: MetricsServer):
    threads = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        some = (METRICS.most_connections or 0) + 20
        silent = [stack.enter_context(connect(server)) for _ in range(some)]
        assert b"answer 42.0" in scrape(server)[0]
        assert all(is_ended(one) for one in silent[:20]), "the oldest"
        assert not set(threading.enumerate()) - threads, "none for each connection"


def test_who_says_nothing_is_hung_up_on():
    hasty = replace(METRICS, idle_seconds=0.1)
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, hasty)
    with contextlib.closing(server), connect(server) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert is_ended(connection)


def test_closing_ends_all_connections_and_frees_the_port(server: MetricsServer):
    other = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, METRICS)
    with pytest.raises(OSError, match="in use"):
        MetricsServer(CollectorRegistry(), "127.0.0.1", other.port, METRICS)
    with connect(other) as connection:
        begun = time.monotonic()
        other.close()
        assert is_ended(connection)
        assert time.monotonic() - begun < SECONDS / 2
    MetricsServer(CollectorRegistry(), "127.0.0.1", other.port, METRICS).close()
