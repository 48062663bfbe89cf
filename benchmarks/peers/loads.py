"""The loads, by name: ``256/128@8`` is prompt and output tokens, and the number of clients.

``azure@8`` has the lengths of a clip of Azure's conversation trace, scaled to fit the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.deploy.load_generator.trace import read_trace
from kvrelay.deploy.load_generator.workload import (
    MIN_REQUESTS,
    ClosedLoop,
    Job,
    Load,
    Shape,
    Workload,
    WorkloadError,
    fixed_jobs,
    scheduled,
    shrink,
    trace_jobs,
)

AZURE = "azure"
TRACE_FACTOR = 0.5
"""On the trace's lengths: its median prompt is of 1,020 tokens, the model takes 2,048 in all."""
TRACE_MAX_INPUT = 1024
_SEED = 20261122


class LoadNameError(ValueError):
    """No load has such a name."""


@dataclass(frozen=True)
class Lengths:
    """What prompts and outputs are like: one shape, or those of a trace."""

    name: str
    trace: Path | None = None

    def jobs(self, count: int) -> list[Job]:
        """The first ``count`` requests; their arrivals are still to be scheduled."""
        if self.name != AZURE:
            return fixed_jobs(Shape.parse(self.name), count)
        if self.trace is None:
            raise LoadNameError("a load of the Azure trace needs --trace FILE")
        return trace_jobs(shrink(read_trace(self.trace, count), TRACE_FACTOR), TRACE_MAX_INPUT)

    def workload(self, load: Load, count: int, number: int) -> Workload:
        """``count`` requests; another ``number`` gives other prompts and arrivals."""
        return scheduled(self.name, load, self.jobs(count), (_SEED, number))


@dataclass(frozen=True)
class NamedLoad:
    """A closed loop of so many clients."""

    name: str
    lengths: Lengths
    concurrency: int

    @classmethod
    def parse(cls, text: str, trace: Path | None = None) -> NamedLoad:
        """Read ``LENGTHS@CLIENTS``. Raises ``LoadNameError``."""
        lengths, at, concurrency = text.partition("@")
        if not (at and concurrency.isdecimal() and int(concurrency)):
            raise LoadNameError(f"{text!r} is not LENGTHS@CLIENTS, for example 256/128@8")
        return cls(text, parse_lengths(lengths, trace), int(concurrency))

    def workload(self, requests_per_client: int, number: int) -> Workload:
        """The run number ``number`` of this load."""
        count = max(MIN_REQUESTS, requests_per_client * self.concurrency)
        return self.lengths.workload(ClosedLoop(self.concurrency), count, number)


def parse_lengths(text: str, trace: Path | None = None) -> Lengths:
    """Read ``INPUT/OUTPUT`` or ``azure``. Raises ``LoadNameError``."""
    if text != AZURE:
        try:
            Shape.parse(text)
        except WorkloadError as error:
            raise LoadNameError(str(error)) from error
    return Lengths(text, trace)
