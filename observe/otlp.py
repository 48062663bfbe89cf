"""Export of spans to an OpenTelemetry collector over OTLP/gRPC, on a thread of its own.

The messages of OTLP are imported when the first span comes: a process without spans does not pay
for them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from kvrelay.observe.spans import Attributes, Span

if TYPE_CHECKING:
    from kvrelay.observe.otlp_calls import CollectorCalls

_log = logging.getLogger(__name__)

DEFAULT_PORT: Final = 4317
MOST_WAITING: Final = 4096
"""The most spans that wait to be sent; more are dropped."""
_MOST_IN_A_CALL: Final = 512
_INTERVAL_SECONDS: Final = 1.0
"""Seconds between two calls, while spans come."""
_CALL_SECONDS: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 30.0
"""The longest pause before a call is tried again; pauses double up to it."""
_LAST_CALL_SECONDS: Final = 1.0
_RETRIED: Final = frozenset(
    {"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"}
)
"""The status codes that OTLP calls retryable."""


class Fate(StrEnum):
    """The fate of a span: exported, or the reason why it was dropped."""

    EXPORTED = "exported"
    FULL = "full"
    """Dropped because too many spans were waiting."""
    REFUSED = "refused"
    """Dropped because the collector refused it."""
    UNSENT = "unsent"
    """Dropped because the process ended while the collector was away."""


Count = Callable[[Fate, int], object]


@dataclass(frozen=True, slots=True)
class SpanCollector:
    """The OpenTelemetry collector to which spans are sent."""

    target: str
    """``host:port``."""
    encrypted: bool

    @staticmethod
    def parse(endpoint: str) -> SpanCollector:
        """Parse ``[http[s]://]host[:port]``. Raises ValueError for anything else."""
        scheme, separator, rest = endpoint.rpartition("://")
        rest = rest.removesuffix("/")
        if (separator and scheme not in ("http", "https")) or not rest or set(rest) & set("/ @?#"):
            raise ValueError(f"must be like http://localhost:{DEFAULT_PORT}, got {endpoint}")
        host, colon, port = rest.rpartition(":")
        if not colon or rest.endswith("]"):
            rest = f"{rest}:{DEFAULT_PORT}"
        elif not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"must end in a port, got {endpoint}")
        return SpanCollector(rest, scheme == "https")


class OtlpExporter:
    """An exporter that takes spans from any thread and sends a batch each second.

    While the collector is away spans wait, up to a bound; later ones are dropped and counted.

    Args:
        collector: where the spans go.
        resource: the attributes of the process that the spans come from.
        count: called with what became of spans; on any thread.
    """

    def __init__(self, collector: SpanCollector, resource: Attributes, count: Count) -> None:
        self._collector = collector
        self._resource = resource
        self._count = count
        self._waiting: queue.SimpleQueue[Span | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._complaint = ""
        """The latest complaint in the log, which is not repeated for each call."""

    def put(self, span: Span) -> None:
        """Take a span, or drop and count it. For any thread; does not block."""
        if self._closing.is_set():
            self._count(Fate.UNSENT, 1)
        elif self._waiting.qsize() >= MOST_WAITING:
            self._count(Fate.FULL, 1)
        else:
            self._waiting.put(span)
            if self._thread is None:
                self._start()

    def close(self) -> None:
        """Send the waiting spans, if the collector takes them at once.

        Blocks for seconds at most.
        """
        with self._starting:
            self._closing.set()
        self._waiting.put(None)
        if self._thread is None:
            self._drop_waiting()
        else:
            self._thread.join(_CALL_SECONDS + 2 * _LAST_CALL_SECONDS)

    def _start(self) -> None:
        with self._starting:
            if self._thread is not None or self._closing.is_set():
                return
            thread = threading.Thread(target=self._run, name="otlp", daemon=True)
            with contextlib.suppress(RuntimeError):  # none can be had: the next span tries again
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        try:
            from kvrelay.observe.otlp_calls import CollectorCalls

            with CollectorCalls(self._collector, self._resource) as calls:
                while batch := self._next_batch():
                    self._send(calls, batch)
        except Exception:  # tracing must not end a worker, and must not be lost in silence
            _log.exception("no more spans are sent to %s", self._collector.target)
            self._closing.set()
            self._drop_waiting()

    def _next_batch(self) -> list[Span]:
        """Wait for a span and those that follow it within a second; empty: the exporter closes."""
        first = self._waiting.get()
        if first is None:
            return []
        self._closing.wait(_INTERVAL_SECONDS)
        batch = [first]
        while len(batch) < _MOST_IN_A_CALL and not self._waiting.empty():
            span = self._waiting.get_nowait()
            if span is None:
                self._waiting.put(None)  # once more, for the next call
                break
            batch.append(span)
        return batch

    def _drop_waiting(self) -> None:
        """Count the waiting spans as unsent; the next batch is the empty one."""
        dropped = 0
        while not self._waiting.empty():
            dropped += self._waiting.get_nowait() is not None
        self._count(Fate.UNSENT, dropped)
        self._waiting.put(None)

    def _send(self, calls: CollectorCalls, batch: Sequence[Span]) -> None:
        """Send a batch, again and again while the collector is away."""
        pause, away = _FIRST_PAUSE_SECONDS, False
        while True:
            last = self._closing.is_set()
            try:
                answer = calls.export(batch, _LAST_CALL_SECONDS if last else _CALL_SECONDS)
            except (ValueError, TypeError) as error:  # a field that its message does not take
                self._complain(f"cannot be sent: {error}")
                self._count(Fate.REFUSED, len(batch))
                return
            if isinstance(answer, int):
                self._complaint = ""
                break
            if answer not in _RETRIED:
                self._complain(f"{self._collector.target} answers {answer}")
                answer = len(batch)
                break
            if last:
                self._count(Fate.UNSENT, len(batch))
                self._drop_waiting()
                return
            if not away:
                away = True
                _log.warning("spans: %s cannot be reached: %s", self._collector.target, answer)
            self._closing.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        if away:
            _log.warning("spans: %s has answered again", self._collector.target)
        self._count(Fate.EXPORTED, len(batch) - answer)
        self._count(Fate.REFUSED, answer)

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            self._complaint = what
            _log.warning("spans: %s", what)
