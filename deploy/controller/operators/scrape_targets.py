"""The targets that Prometheus is to scrape, in the form of its HTTP service discovery."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvrelay.router.discovery import Discovery

EVERYWHERE: Final = ("", "0.0.0.0", "[::]", "::")  # noqa: S104 (not bound)
"""Wildcard hosts, at which a process listens but is not reached."""


class ScrapeTargets:
    """The scrape targets: the controller, the workers and the routers that listen to it.

    The label `instance` is a worker's name, so its series go on when it is restarted at another
    port.

    Args:
        cluster: the value of the label `cluster`, which tells one cluster from others.
        discovery: lists the workers.
    """

    def __init__(self, cluster: str, discovery: Discovery) -> None:
        self._cluster = cluster
        self._discovery = discovery
        self._routers: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def router(self, metrics_address: str) -> Iterator[None]:
        """List another router's metrics while the context lasts; ignore an empty address."""
        with self._lock:
            self._routers[metrics_address] += 1
        try:
            yield
        finally:
            with self._lock:
                self._routers[metrics_address] -= 1
                if not self._routers[metrics_address]:  # addresses of pods never come again
                    del self._routers[metrics_address]

    def json(self, asked: str) -> bytes:
        """The targets; for any thread.

        Args:
            asked: ``host:port`` at which Prometheus reached the controller, where its own metrics
                are.
        """
        with self._lock:
            routers = [address for address in self._routers if address]
        targets = [("controller", asked)] if asked else []
        targets += [(f"router-{address}", address) for address in sorted(routers)]
        targets += [(one.name, one.metrics_address) for one in self._discovery.endpoints()]
        return json.dumps(
            [
                {"targets": [address], "labels": {"cluster": self._cluster, "instance": name}}
                for name, address in targets
            ]
        ).encode()
