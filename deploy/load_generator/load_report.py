"""The figures of a run from its request records, by the conventions of vLLM's benchmark.

- TTFT: request sent to the first delta with tokens.
- ITL: the gap between two deltas with tokens, one sample a gap, however many
  tokens a delta holds (``tokens_per_delta`` says how many they held). Pooled
  over all requests.
- TPOT: first token to last token, over the tokens after the first; one sample a
  request, none for a request of one token.
- End to end: request sent to the end of its stream.
- Percentiles, throughput and token counts are those of completed requests.
  Throughput is over the time from the first request sent to the last one ended.
- SLO: a request attains it if it completed and both its TTFT and its mean ITL are within bounds.
  The mean ITL is its TPOT, so that several tokens a delta do not count against it. The share is of
  all requests sent: one that was rejected or failed did not attain it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvrelay.deploy.load_generator.load_client import RequestRecord
from kvrelay.deploy.load_generator.workload import Workload

PHASES = ("queue", "prefill", "transfer", "decode")


@dataclass(frozen=True)
class Stats:
    """A sample's mean, percentiles (linearly interpolated) and maximum."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Stats | None:
        """Statistics in milliseconds of samples in seconds; None if there are none."""
        sample = np.fromiter(seconds, dtype=np.float64) * 1000
        if not sample.size:
            return None
        p50, p90, p95, p99 = np.percentile(sample, (50, 90, 95, 99)).tolist()
        mean, maximum = float(sample.mean()), float(sample.max())
        return cls(sample.size, mean, p50, p90, p95, p99, maximum)


@dataclass(frozen=True)
class Slo:
    """Upper bounds in milliseconds; None does not bound."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request completed within every bound."""
        return (
            record.completed
            and _within(ttft(record), self.ttft_ms)
            and _within(tpot(record), self.itl_ms)
        )


def _within(seconds: float | None, bound_ms: float | None) -> bool:
    return bound_ms is None or seconds is None or seconds * 1000 <= bound_ms


def ttft(record: RequestRecord) -> float:
    """Seconds to the first token of a completed request."""
    return record.token_times[0] - record.sent


def itl(record: RequestRecord) -> list[float]:
    """Seconds between the deltas of a completed request."""
    return [later - earlier for earlier, later in pairwise(record.token_times)]


def tpot(record: RequestRecord) -> float | None:
    """Seconds a token after the first of a completed request; None if there is no other."""
    after_first = sum(record.token_counts) - 1
    if after_first < 1:
        return None
    return (record.token_times[-1] - record.token_times[0]) / after_first


@dataclass(frozen=True)
class Requests:
    """The requests by outcome: planned = completed + failed + not_sent."""

    planned: int
    completed: int
    failed: int
    not_sent: int  # the time ran out
    failures: dict[str, int]  # by status


@dataclass(frozen=True)
class Attainment:
    """Requests within the SLO."""

    ttft_ms: float | None
    itl_ms: float | None
    met: int
    share: float  # of the requests sent
    goodput_rps: float


@dataclass(frozen=True)
class LoadReport:
    """The figures of one run. Durations are milliseconds unless the name says otherwise."""

    workload: str
    load: str
    seed: tuple[int, ...]
    requests: Requests
    duration_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    tokens_per_delta: float | None
    ttft_ms: Stats | None
    itl_ms: Stats | None
    tpot_ms: Stats | None
    e2e_ms: Stats | None
    phases_ms: dict[str, Stats | None]  # as the server reports them
    send_lag_ms: Stats | None  # how late the generator itself was; None in a closed loop
    client_cpu_percent: float  # of one core, the generator's own
    slo: Attainment | None


def summarise(
    workload: Workload, records: Sequence[RequestRecord], slo: Slo, client_cpu_s: float = 0.0
) -> LoadReport:
    """Return the figures of one run's records."""
    done = [record for record in records if record.completed]
    duration = _duration(records)
    output_tokens = sum(sum(record.token_counts) for record in done)
    deltas = sum(len(record.token_counts) for record in done)
    return LoadReport(
        workload=workload.name,
        load=str(workload.load),
        seed=workload.seed,
        requests=_requests(len(workload.jobs), records),
        duration_s=duration,
        input_tokens=sum(record.input_len for record in done),
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=output_tokens,
        output_tokens_per_s=_rate(output_tokens, duration),
        requests_per_s=_rate(len(done), duration),
        tokens_per_delta=output_tokens / deltas if deltas else None,
        ttft_ms=Stats.of(ttft(record) for record in done),
        itl_ms=Stats.of(gap for record in done for gap in itl(record)),
        tpot_ms=Stats.of(value for record in done if (value := tpot(record)) is not None),
        e2e_ms=Stats.of(record.ended - record.sent for record in done),
        phases_ms={phase: _phase(done, phase) for phase in PHASES},
        send_lag_ms=Stats.of(r.sent - r.due for r in records if r.due is not None),
        client_cpu_percent=100 * _rate(client_cpu_s, duration),
        slo=_attainment(records, slo, duration) if slo else None,
    )


def _duration(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(record.ended for record in records) - min(record.sent for record in records)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _requests(planned: int, records: Sequence[RequestRecord]) -> Requests:
    failures = Counter(record.status for record in records if not record.completed)
    failed = failures.total()
    return Requests(
        planned=planned,
        completed=len(records) - failed,
        failed=failed,
        not_sent=planned - len(records),
        failures=dict(sorted(failures.items())),
    )


def _phase(done: Sequence[RequestRecord], phase: str) -> Stats | None:
    return Stats.of(getattr(record.phases, phase) for record in done if record.phases is not None)


def _attainment(records: Sequence[RequestRecord], slo: Slo, duration: float) -> Attainment:
    met = sum(slo.met_by(record) for record in records)
    share = met / len(records) if records else 0.0
    return Attainment(slo.ttft_ms, slo.itl_ms, met, share, _rate(met, duration))
