"""What a run has to do, and what it has cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Load:
    """What the router has to do."""

    workers: int
    """Half of them prefill, half of them decode."""
    requests_per_second: float
    input_tokens: int = 240
    """About the mean; from an eighth of it to twice as many."""
    output_tokens: int = 16
    seconds: float = 4.0
    """Virtual ones, that are measured."""
    utilization: float = 0.9
    """Of the prefill workers."""
    routers: int = 1
    """That requests come to at random; none knows what the others send."""
    paced: bool = True
    """Loads are told as real workers tell them; else at once, at every step."""


@dataclass(frozen=True)
class Figure:
    """What one run has cost."""

    load: Load
    requests: int
    tokens: int
    loads: int
    cores: float
    """CPU seconds of the routers a virtual second."""
    wait_ms_mean: float
    """Virtual ones, of requests for a prefill worker that computes others."""
    wait_ms_p99: float


@dataclass
class Counts:
    """What has happened since the last reset."""

    requests: int = 0
    tokens: int = 0
    loads: int = 0
    waits: list[float] = field(default_factory=list)


class Script:
    """The CPU seconds of what is not the router: scripted workers and clients, and this clock.

    ``with script:`` around what is to count; blocks are not nested.
    """

    def __init__(self) -> None:
        self.seconds = self._own_seconds = self._begun = 0.0
        begun = time.thread_time()
        for _ in range(1000):
            with self:
                pass
        self._own_seconds = (time.thread_time() - begun - self.seconds) / 1000
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._begun = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._begun + self._own_seconds
