"""The processes of the benchmark that drives a router."""

from __future__ import annotations

import pytest

from benchmarks.router_tokens import Processes, run_client

pytestmark = pytest.mark.slow  # it tests a benchmark, and `make test-all` runs it

SECONDS = 60


def test_a_client_that_fails_ends_and_whoever_asks_it_hears_so():
    processes = Processes()
    client = processes.start("asyncio", run_client, "grpc", "127.0.0.1:1", 2, 8, 8)
    try:
        assert client.poll(SECONDS), "it does not end"
        with pytest.raises((EOFError, ConnectionError)):
            client.recv()
    finally:
        processes.end()
