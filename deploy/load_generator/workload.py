"""The workload of a run: lengths, prompts and arrival times, all derived from one seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from kvrelay.deploy.load_generator.trace import BLOCK_TOKENS, TraceRow

# One stream of random numbers for each use, so that no use shifts another's numbers.
_PROMPT, _WARM_UP_PROMPT, _BLOCK, _ARRIVAL = range(4)

MIN_REQUESTS = 8
REQUESTS_PER_SLOT = 4
OPEN_LOOP_REQUESTS = 100


class WorkloadError(ValueError):
    """The workload asked for cannot be made, or the model cannot take it."""


@dataclass(frozen=True)
class Shape:
    """Prompt and output length, in tokens, of every request of a run."""

    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        if min(self.input_len, self.output_len) < 1:
            raise WorkloadError(f"shape {self}: both lengths must be at least 1")

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read ``INPUT/OUTPUT``, for example ``256/128``."""
        parts = text.split("/")
        if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
            raise WorkloadError(f"shape {text!r} is not INPUT/OUTPUT, for example 256/128")
        return cls(int(parts[0]), int(parts[1]))


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` clients, each of which sends its next request when its last one has ended."""

    concurrency: int

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True)
class Poisson:
    """Poisson arrivals at `rate` a second, regardless of how many requests still run."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:g} req/s"


@dataclass(frozen=True)
class Replay:
    """Arrivals at the times of a trace; `time_scale` 0.1 replays it ten times as fast."""

    time_scale: float

    def __str__(self) -> str:
        return f"replay x{self.time_scale:g}"


Load = ClosedLoop | Poisson | Replay


@dataclass(frozen=True)
class Job:
    """One request to be sent."""

    index: int
    input_len: int
    output_len: int
    due: float | None = None  # seconds after the start; None: when a slot is free
    blocks: tuple[int, ...] = ()  # prompts that share a block id share its tokens


@dataclass(frozen=True)
class Workload:
    """The jobs of one run in the order in which they are sent."""

    name: str
    load: Load
    jobs: tuple[Job, ...]
    seed: tuple[int, ...]


class Prompts:
    """Random token ids, the same for the same seed, job and vocabulary.

    The prompts of a warm-up differ from those of the measured run.
    """

    def __init__(self, vocab_size: int, seed: Sequence[int], warm_up: bool = False) -> None:
        if vocab_size < 1:
            raise WorkloadError(f"the server reports a vocabulary of {vocab_size} tokens")
        self._vocab_size = vocab_size
        self._seed = tuple(seed)
        self.warm_up = warm_up
        self._stream = _WARM_UP_PROMPT if warm_up else _PROMPT

    def token_ids(self, job: Job) -> list[int]:
        """Return the job's prompt: `job.input_len` ids."""
        if not job.blocks:
            return self._draw(self._stream, job.index, job.input_len)
        needed = -(-job.input_len // BLOCK_TOKENS)
        ids = [
            token
            for block in job.blocks[:needed]
            for token in self._draw(_BLOCK, block, BLOCK_TOKENS)
        ]
        return ids[: job.input_len]

    def _draw(self, stream: int, index: int, size: int) -> list[int]:
        rng = np.random.default_rng([*self._seed, stream, index])
        ids: list[int] = rng.integers(self._vocab_size, size=size).tolist()
        return ids


def fixed_jobs(shape: Shape, requests: int) -> list[Job]:
    """Return requests that are all of one shape."""
    return [Job(index, shape.input_len, shape.output_len) for index in range(requests)]


def trace_jobs(
    rows: Iterable[TraceRow], max_input_len: int | None = None, max_output_len: int | None = None
) -> list[Job]:
    """Return one job a row: lengths cut to the caps, due at its time after the first row's."""
    ordered = sorted(rows, key=lambda row: row.at)
    first = ordered[0].at if ordered else 0.0
    return [
        Job(
            index,
            min(row.input_len, max_input_len or row.input_len),
            min(row.output_len, max_output_len or row.output_len),
            row.at - first,
            row.blocks,
        )
        for index, row in enumerate(ordered)
    ]


def shrink(rows: Iterable[TraceRow], factor: float) -> list[TraceRow]:
    """Return the rows with both lengths times `factor`, at least one token each."""
    return [
        replace(
            row,
            input_len=max(1, round(row.input_len * factor)),
            output_len=max(1, round(row.output_len * factor)),
        )
        for row in rows
    ]


def schedule(jobs: Sequence[Job], load: Load, seed: Sequence[int]) -> tuple[Job, ...]:
    """Return the jobs with the due times that the load gives them."""
    if isinstance(load, ClosedLoop):
        return tuple(replace(job, due=None) for job in jobs)
    if isinstance(load, Replay):
        return tuple(replace(job, due=(job.due or 0.0) * load.time_scale) for job in jobs)
    rng = np.random.default_rng([*seed, _ARRIVAL])
    gaps = rng.exponential(1 / load.rate, size=len(jobs))
    due = np.cumsum(gaps) - gaps[:1].sum()  # the first is due at once
    return tuple(replace(job, due=float(at)) for job, at in zip(jobs, due, strict=True))


def default_requests(load: Load) -> int:
    """Return a run's number of requests by default: enough to keep every slot busy."""
    if isinstance(load, ClosedLoop):
        return max(MIN_REQUESTS, REQUESTS_PER_SLOT * load.concurrency)
    return OPEN_LOOP_REQUESTS


def fixed_workloads(
    shapes: Sequence[Shape], loads: Sequence[Load], requests: int | None, seed: int
) -> list[Workload]:
    """Return one workload for every shape and load, no two of which share a prompt."""
    return [
        scheduled(
            str(shape), load, fixed_jobs(shape, requests or default_requests(load)), (seed, number)
        )
        for number, (shape, load) in enumerate(product(shapes, loads))
    ]


def trace_workloads(
    name: str, jobs: Sequence[Job], loads: Sequence[Load], requests: int | None, seed: int
) -> list[Workload]:
    """Return the head of the trace, once for every load."""
    return [
        scheduled(name, load, jobs[: requests or default_requests(load)], (seed, number))
        for number, load in enumerate(loads)
    ]


def scheduled(name: str, load: Load, jobs: Sequence[Job], seed: tuple[int, ...]) -> Workload:
    """Return the jobs as one run; `seed` determines their prompts and arrivals."""
    return Workload(name, load, schedule(jobs, load, seed), seed)


def check_lengths(workload: Workload, max_model_len: int) -> None:
    """Raise ``WorkloadError`` if a job is longer than the model can take. Nothing is cut here."""
    too_long = [job for job in workload.jobs if job.input_len + job.output_len > max_model_len]
    if too_long:
        raise WorkloadError(
            f"{len(too_long)} of {len(workload.jobs)} requests of {workload.name} are longer than "
            f"the model's {max_model_len} tokens: choose a smaller --shape, or cut a trace with "
            "--max-input-len and --max-output-len"
        )
