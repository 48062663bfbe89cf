"""The router of a simulation: submits requests, and follows each over its attempts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvrelay.engine.scheduler.commands import Submit
from kvrelay.wire.output import (
    EndReason,
    EngineOutputs,
    FailureReason,
    RequestEnd,
    RequestOutput,
    SampledToken,
)
from kvrelay.wire.submit import (
    CancelRequest,
    KeptSession,
    RequestKey,
    SamplingParams,
    StopConditions,
)
from kvrelay.wire.worker_info import WorkerAddress, WorkerRole
from tests.engine.simulation.model import GREEDY
from tests.engine.simulation.worker import SimWorker
from tests.engine.submissions import submit


@dataclass(eq=False)
class SimRequest:
    """A request and what came of it."""

    key: RequestKey
    prompt: list[int]
    max_tokens: int
    priority: int
    arrived: float
    prefill: SimWorker
    decode: SimWorker
    sampling: SamplingParams
    stops: StopConditions
    wanted_prompt_logprobs: int | None = None
    tokens: dict[int, SampledToken] = field(default_factory=dict)
    prompt_logprobs: tuple[SampledToken, ...] = ()
    ends: dict[str, Any] = field(default_factory=dict)
    disturbed: bool = False
    cached_tokens: int = 0
    retractions: int = 0
    alone: bool = False
    """A forward failed with it and others, so it is computed alone."""
    decode_drained: bool = False
    """An attempt was retracted by a drain; its prompt may still be computed."""
    session: KeptSession | None = None
    """Whose turn it is."""
    lost_worker: bool = False
    """A worker died with an attempt of it, which the other worker may still go on with."""

    @property
    def output(self) -> list[int]:
        return [token.token_id for token in self.samples]

    @property
    def samples(self) -> list[SampledToken]:
        """The output's tokens, with the log-probabilities that were asked for."""
        return [self.tokens[index] for index in sorted(self.tokens)]


class SimRouter:
    """Places requests on random workers, and checks what the workers say of them.

    A test may replace `take_output` and `cancel_on_other_worker` of one simulation.

    Args:
        random: chooses the workers.
        local: the part of the requests whose prompts decode workers compute.
    """

    prefills: list[SimWorker]
    decodes: list[SimWorker]
    workers: list[SimWorker]

    def __init__(self, random: random.Random, local: float = 0.0) -> None:
        self.random = random
        self.local = local
        self._arrivals = 0
        self.attempts = 0
        self.submitted: list[SimRequest] = []
        self.requests: dict[RequestKey, SimRequest] = {}
        """All attempts' requests, by the attempt's key."""

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int = 0,
        sampling: SamplingParams = GREEDY,
        *,
        alone: bool = False,
        session: KeptSession | None = None,
        place: tuple[SimWorker, SimWorker] | None = None,
        **stops: Any,
    ) -> SimRequest:
        return self.submit_choices(
            1, prompt, max_tokens, priority, sampling, alone=alone, session=session, place=place,
            **stops,
        )[0]  # fmt: skip

    def submit_choices(
        self,
        choices: int,
        prompt: list[int],
        max_tokens: int,
        priority: int = 0,
        sampling: SamplingParams = GREEDY,
        prompt_logprobs: int | None = None,
        *,
        alone: bool = False,
        session: KeptSession | None = None,
        place: tuple[SimWorker, SimWorker] | None = None,
        **stops: Any,
    ) -> list[SimRequest]:
        arrived = self.now()
        request_id, place = str(len(self.submitted)), place or self._place(prompt, max_tokens)
        conditions = StopConditions(max_tokens=max_tokens, **stops)
        requests = []
        for choice in range(choices):
            key = RequestKey("router", request_id, 0, choice)
            one = SimRequest(
                key, prompt, max_tokens, priority, arrived, *place, sampling, conditions,
                wanted_prompt_logprobs=prompt_logprobs, alone=alone, session=session,
            )  # fmt: skip
            requests.append(one)
        self.submitted += requests
        self._attempt(requests)
        return requests

    def now(self) -> float:
        """When the next request arrives."""
        self._arrivals += 1
        return float(self._arrivals)

    def _place(self, input_ids: list[int], max_tokens: int) -> tuple[SimWorker, SimWorker]:
        """The workers for a request's prompt and for its output; may be the same one."""
        prefill, decode = (
            self.random.choice([worker for worker in workers if not worker.draining])
            for workers in (self.prefills, self.decodes)
        )
        if self.local and self.random.random() < self.local:
            return decode, decode
        return prefill, prefill if decode in self.prefills else decode

    def _attempt(self, choices: Sequence[SimRequest]) -> None:
        """Submit choices of a request to its workers, with what was emitted."""
        self.attempts += 1
        for one in choices:
            one.key = one.key._replace(attempt=self.attempts)
            one.ends = {}
            self.requests[one.key] = one
        request = choices[0]
        command = submit(
            request.prefill.link,
            request.key,
            request.prompt,
            request.stops,
            request.sampling,
            emitted=request.output,
            n=len(choices),
            prompt_logprobs=request.wanted_prompt_logprobs,
            priority=request.priority,
            arrived=request.arrived,
            alone=request.alone,
        )
        in_session = replace(command.submission, session=request.session)
        if request.decode is not request.prefill:
            peer = WorkerAddress("", request.prefill.name)
            to_decode = replace(in_session, prefill=peer)
            self.send(
                request.decode,
                replace(command, link=request.decode.link, submission=to_decode),
            )
        else:
            command = replace(command, submission=in_session)
        self.send(request.prefill, command)

    def send(self, worker: SimWorker, command: Submit) -> None:
        """Submit an attempt to one of its workers."""
        worker.inbox.post(command)

    def _lose(self, worker: SimWorker, command: Submit) -> None:
        """Move the requests of a submission that was on its way to a worker that has left."""
        for choice in command.submission.choices:
            request = self.requests[command.key.of_choice(choice)]
            if request.key == command.key.of_choice(choice):
                self._move(request, worker)

    def lose_worker(self, worker: SimWorker) -> None:
        """A worker has died: the requests that it had not ended go on elsewhere."""
        for request in self.submitted:
            both = {request.prefill.name, request.decode.name}
            if worker.name not in both - request.ends.keys():
                continue
            others = both & request.ends.keys()
            if others and len(request.output) == request.max_tokens:
                request.ends[worker.name] = RequestEnd(EndReason.FAILED)
                self.ended(request)
                continue
            request.lost_worker = True
            self._move(request, worker)

    def ended(self, request: SimRequest) -> None:
        """Called when a request has ended on all of its workers; a test may replace it."""

    def collect_outputs(self) -> None:
        """Take what the workers have sent."""
        for worker in self.workers:
            for step in worker.link.take_all():
                assert step is not None
                if step.load is not None:
                    worker.draining = step.load.draining
                self.take_step(worker, step)
                for output in step.outputs:
                    self.take_output(worker, output)

    def take_step(self, worker: SimWorker, step: EngineOutputs) -> None:
        """A worker has sent something; a test may replace it."""

    def take_output(self, worker: SimWorker, output: RequestOutput) -> None:
        """Record an output of a worker, and do what a router does about it."""
        request = self.requests[output.key]
        if output.key != request.key:
            late = worker.role_name is WorkerRole.PREFILL and request.decode_drained
            late |= request.lost_worker
            assert not output.tokens or late, "an attempt that was retracted goes on"
            return
        for offset, token in enumerate(output.tokens):
            assert output.index + offset not in request.tokens, "a token was emitted twice"
            request.tokens[output.index + offset] = token
        if output.prompt_logprobs:  # another attempt begins at the first again
            assert len(output.prompt_logprobs) <= worker.config.chunk_tokens
            known = request.prompt_logprobs[: output.prompt_index - 1]
            assert len(known) == output.prompt_index - 1
            request.prompt_logprobs = known + output.prompt_logprobs
        request.cached_tokens += output.cached_tokens
        if output.end is not None and self._moves(request, output.end):
            self._move(request, worker)
        elif output.end is not None:
            assert worker.name not in request.ends, "a worker ended a request twice"
            request.ends[worker.name] = output.end
            if request.ends.keys() >= {request.prefill.name, request.decode.name}:
                self.ended(request)
            if output.end.reason in (EndReason.ABORTED, EndReason.FAILED):
                self.cancel_on_other_worker(request, worker)

    def _moves(self, request: SimRequest, end: RequestEnd) -> bool:
        """Whether another attempt goes on after this end, as no fault of the request."""
        drains = request.prefill.draining or request.decode.draining
        if end.cause is FailureReason.FORWARD_FAILED:
            request.alone = True
            return True
        return end.reason is EndReason.RETRACTED or (end.cause is not None and drains)

    def _move(self, request: SimRequest, worker: SimWorker) -> None:
        """`worker` has ended its part: submit another attempt."""
        if request.prefill is not request.decode:
            self.cancel_on_other_worker(request, worker)
        if len(request.output) == request.max_tokens:
            return  # the prefill worker has emitted all of it
        request.retractions += 1
        request.decode_drained |= request.decode.draining
        input_ids = [*request.prompt, *request.output]
        request.prefill, request.decode = self._place(input_ids, request.max_tokens)
        self._attempt([request])

    def cancel_on_other_worker(self, request: SimRequest, worker: SimWorker) -> None:
        """One of a request's two workers has ended its part: cancel it on the other one."""
        other = request.decode if worker is request.prefill else request.prefill
        if other.name not in request.ends:
            other.inbox.post(CancelRequest(request.key))
