"""One streamed request, with the time of every delta."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import grpc

from kvrelay.client.access import Metadata
from kvrelay.deploy.load_generator.workload import Job, Prompts
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc as rpc

OK = "OK"
# The stream ended in good order, but not with the output that was asked for.
WRONG_OUTPUT = "WRONG_OUTPUT"


class RunClock:
    """A stopwatch that starts when it is made: the time base of one run."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def now(self) -> float:
        """Return seconds since the start."""
        return time.perf_counter() - self._origin


@dataclass(frozen=True)
class PhaseSeconds:
    """The parts of a request's time, as the server reports them."""

    queue: float
    prefill: float
    transfer: float
    decode: float


@dataclass(frozen=True)
class RequestRecord:
    """The course of one request; times are seconds after the run's start.

    ``token_times`` and ``token_counts`` have one entry for each delta that held
    tokens. ``status`` is ``OK``, a gRPC status name, ``HTTP_`` and a status, the name
    of an exception, or ``WRONG_OUTPUT``.
    """

    index: int
    input_len: int
    output_len: int  # asked for
    due: float | None  # None in a closed loop
    sent: float
    ended: float
    token_times: tuple[float, ...]
    token_counts: tuple[int, ...]
    status: str = OK
    detail: str = ""
    cached_tokens: int = 0
    phases: PhaseSeconds | None = None

    @property
    def completed(self) -> bool:
        """Whether the client got exactly the output that it asked for."""
        return self.status == OK


@dataclass
class TokenLog:
    """A recorder of the times at which one stream's tokens come."""

    job: Job
    sent: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def take_tokens(self, count: int, now: float) -> None:
        """Note a delta of ``count`` tokens."""
        self.times.append(now)
        self.counts.append(count)

    def wrong_length(self) -> str:
        """Return what is wrong with the number of tokens; empty if it is the requested one."""
        if sum(self.counts) != self.job.output_len:
            return f"{sum(self.counts)} tokens instead of {self.job.output_len}"
        return ""

    def record(
        self,
        now: float,
        status: str,
        detail: str = "",
        cached_tokens: int = 0,
        phases: PhaseSeconds | None = None,
    ) -> RequestRecord:
        """Return the record of the stream, which ended now."""
        return RequestRecord(
            index=self.job.index,
            input_len=self.job.input_len,
            output_len=self.job.output_len,
            due=self.job.due,
            sent=self.sent,
            ended=now,
            token_times=tuple(self.times),
            token_counts=tuple(self.counts),
            status=status,
            detail=detail,
            cached_tokens=cached_tokens,
            phases=phases,
        )


@dataclass
class _StreamLog(TokenLog):
    """A recorder of a gRPC stream, which also checks that the stream is as requested."""

    complete: pb.GenerateComplete | None = None
    fault: str = ""

    def take(self, response: pb.GenerateResponse, now: float) -> None:
        if self.complete is not None:
            self.fault = self.fault or "a message after the completion"
        if response.WhichOneof("event") == "complete":
            self.complete = response.complete
        elif response.delta.token_ids:  # a delta without tokens only flushes held-back text
            self._take_delta(response.delta, now)

    def _take_delta(self, delta: pb.GenerateDelta, now: float) -> None:
        have = sum(self.counts)
        if delta.index != have:
            self.fault = self.fault or f"a delta at index {delta.index} after {have} tokens"
        self.take_tokens(len(delta.token_ids), now)

    def finish(self, now: float) -> RequestRecord:
        fault = self.fault or self._shortfall()
        return self.end(now, WRONG_OUTPUT if fault else OK, fault)

    def _shortfall(self) -> str:
        if self.complete is None:
            return "the stream ended without a completion"
        if self.complete.finish_reason != pb.FINISH_REASON_LENGTH:
            return f"finished with {pb.FinishReason.Name(self.complete.finish_reason)}"
        return self.wrong_length()

    def end(self, now: float, status: str, detail: str) -> RequestRecord:
        cached_tokens = self.complete.usage.cached_tokens if self.complete else 0
        return self.record(now, status, detail, cached_tokens, _phases(self.complete))


def _phases(complete: pb.GenerateComplete | None) -> PhaseSeconds | None:
    if complete is None or not complete.HasField("timings"):
        return None
    timings = complete.timings
    return PhaseSeconds(
        timings.queue_seconds,
        timings.prefill_seconds,
        timings.transfer_seconds,
        timings.decode_seconds,
    )


class LoadClient:
    """A client that sends jobs to one gRPC server, with `metadata`.

    A request that takes longer than `deadline_s` fails.
    """

    def __init__(
        self,
        stub: rpc.InferenceServiceStub,
        prompts: Prompts,
        clock: RunClock,
        deadline_s: float,
        metadata: Metadata = (),
    ) -> None:
        self._stub = stub
        self._prompts = prompts
        self._clock = clock
        self._deadline_s = deadline_s
        self._metadata = metadata

    async def send(self, job: Job) -> RequestRecord:
        """Send one job and read its stream to the end. A fault of the server is in the record."""
        request = _request(self._prompts.token_ids(job), job.output_len)
        log = _StreamLog(job, self._clock.now())
        try:
            call = self._stub.Generate(request, timeout=self._deadline_s, metadata=self._metadata)
            async for response in call:
                log.take(response, self._clock.now())
        except grpc.aio.AioRpcError as error:
            return log.end(self._clock.now(), error.code().name, error.details() or "")
        return log.finish(self._clock.now())


def _request(input_ids: list[int], output_len: int) -> pb.GenerateRequest:
    """Make a greedy request of exactly `output_len` tokens: weights must not change the work."""
    return pb.GenerateRequest(
        input_ids=pb.TokenIds(ids=input_ids),
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True),
    )
