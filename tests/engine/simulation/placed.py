"""A simulated cluster whose requests the router's own placement places, over its own links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvrelay.engine.scheduler.commands import Submit
from kvrelay.router.callers import ANYBODY
from kvrelay.router.generation import GenerationRequest, Submission
from kvrelay.router.placement.choose import PlacementRules, Placer
from kvrelay.router.placement.chosen import Chosen
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.estimate import ExpectedPrompts
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.ready_workers import ReadyWorkers
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.wire.messages import ATTACH_REQUEST, ENGINE_OUTPUTS
from kvrelay.wire.output import EngineOutputs, RequestOutput
from kvrelay.wire.submit import SubmitRequest
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.engine.simulation.clockwork import Clockwork
from tests.engine.simulation.worker import SimWorker
from tests.worker_infos import worker_info


class PlacedClockwork(Clockwork):
    """Every request goes where `Placer` says; what workers send goes through their links.

    Args:
        prefix_entries: that the router remembers of the workers' prefixes; 0: load alone counts.
    """

    def __init__(self, *args: Any, prefix_entries: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.prefixes = KnownPrefixes(prefix_entries)
        self.ready = ReadyWorkers(
            self.prefixes, lambda one: self.links[self.by_name[one]].prompt_queue
        )
        self.placer = Placer(self.ready, PlacementRules())
        self.links = {worker: self._link(worker) for worker in self.workers}
        self.expected_hits = dict.fromkeys(WorkerRole, 0)
        """Tokens."""

    def _link(self, worker: SimWorker) -> WorkerLink:
        info = worker_info(
            worker.name,
            role=worker.role_name,
            pool_tokens=worker.kv_cache.max_lease_tokens,
            max_model_len=worker.most_tokens,
        )
        return WorkerLink(
            info,
            router_id="router",
            credentials=None,
            max_message_bytes=0,
            on_change=self._rank,
            on_stale=lambda: None,
            on_killed=lambda output: None,
            prefixes=self.prefixes,
            on_expected_hit=self._count_hit,
        )

    def _queue_of(self, incarnation: str) -> ExpectedPrompts:
        return self.links[self.by_name[incarnation]].prompt_queue

    def _rank(self, link: WorkerLink) -> None:
        self.ready.put(link.endpoint.role, link.candidate)

    def _count_hit(self, role: WorkerRole, tokens: int) -> None:
        self.expected_hits[role] += tokens

    def _place(self, input_ids: list[int], max_tokens: int) -> tuple[SimWorker, SimWorker]:
        while not all(link.ready for link in self.links.values()):
            assert self.step(), "a worker says nothing"
        marks = self.prefixes.marks_of(input_ids, "")
        total = len(input_ids) + max_tokens
        pair = self.placer.choose(Demand(len(input_ids), total, marks=marks))
        assert isinstance(pair, Chosen), pair
        decode = self.by_name[pair.decode.worker]
        return decode if pair.prefill is None else self.by_name[pair.prefill.worker], decode

    def send(self, worker: SimWorker, command: Submit) -> None:
        link = self.links[worker]
        link.submit(self._submission(command), self, self._peer_of(command))
        message = link._commands.get_nowait()
        assert message is not None
        submit = ATTACH_REQUEST.from_message(message).command
        assert isinstance(submit, SubmitRequest)
        expecting = replace(command.submission, cached_tokens=submit.cached_tokens)
        super().send(worker, replace(command, submission=expecting))

    def _peer_of(self, command: Submit) -> WorkerInfo | None:
        prefill = command.submission.prefill
        return None if prefill is None else self.links[self.by_name[prefill.incarnation]].endpoint

    def _submission(self, command: Submit) -> Submission:
        submission = command.submission
        request = GenerationRequest(
            submission,
            fingerprint=b"",
            input_ids=submission.input_ids,
            caller=ANYBODY,
            marks=self.prefixes.marks_of(submission.input_ids, ""),
        )
        return Submission.of(request, command.key.attempt, range(1), 0.0)

    def take_step(self, worker: SimWorker, step: EngineOutputs) -> None:
        self.links[worker]._receive(ENGINE_OUTPUTS.to_message(step.packed()))

    # What a link's listener hears: `SimRouter` has it from the workers already.

    def on_output(self, role: WorkerRole, output: RequestOutput) -> None:
        """Nothing more is to be done."""

    def on_token(
        self, role: WorkerRole, attempt: int, choice: int, index: int, token_id: int
    ) -> None:
        """Nothing more is to be done."""

    def on_lost(self, attempt: int, endpoint: WorkerInfo, detail: str) -> None:
        """Links are not lost."""


def ttfts(simulation: Clockwork) -> Sequence[float]:
    """Seconds from each request's arrival to its first token."""
    return [simulation.emitted_at[request][0] - request.arrived for request in simulation.submitted]
