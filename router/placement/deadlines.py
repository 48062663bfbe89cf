"""Deadline checks: a choice of workers that are in time for a deadline, and refusal if none is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

from kvrelay.router.errors import DeadlineTooNear
from kvrelay.router.placement.chosen import Chosen, Shortage
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.estimate import ExpectedPrompt, expect_prompt
from kvrelay.router.placement.order import WorkerOrder
from kvrelay.router.placement.ranking import Candidate
from kvrelay.router.placement.ready_workers import ReadyWorkers
from kvrelay.wire.speeds import StepSpeeds
from kvrelay.wire.worker_info import WorkerRole

_COMPARED: Final = 32
"""The workers of each role to compare, the best of placement first: the check must be short."""


class DeadlineCheck:
    """The choice, before submission, of a worker that has the first token in time.

    Only the first token counts: a client may want the output up to its deadline, and nobody knows
    the output's length. Workers are compared by their cached prefix of this prompt. Their latest
    hit rate on other prompts, of any tenant, can only prevent a refusal.

    Args:
        workers: the ready workers.
        order: their order for a request.
        roles: the roles of workers that may compute a prompt.
        margin: the most expected seconds, in multiples of the time that the deadline leaves.
    """

    def __init__(
        self,
        workers: ReadyWorkers,
        order: WorkerOrder,
        roles: Sequence[WorkerRole],
        margin: float,
    ) -> None:
        self._workers = workers
        self._order = order
        self._roles = roles
        self._margin = margin

    def choose(
        self,
        chosen: Chosen,
        demand: Demand,
        seconds_left: float,
        choose: Callable[[Demand], Chosen | Shortage],
    ) -> Chosen:
        """Return what was chosen if its first token is expected in time, else the soonest.

        Args:
            chosen: the choice made without regard to the deadline.
            demand: the attempt's.
            seconds_left: seconds until the deadline.
            choose: chooses without regard to the deadline.

        Raises:
            DeadlineTooNear: even the soonest workers are later than the margin allows.
        """
        first = chosen.prefill or chosen.decode
        expect = partial(self._expect, demand, first.load.speeds)
        if expect(first).seconds <= seconds_left:
            return chosen
        others = (one for one in self._best(demand) if one.incarnation != first.incarnation)
        soonest = sorted([first, *others], key=lambda one: expect(one).seconds)
        while soonest[0] is not first:
            instead = choose(replace(demand, computed_by=soonest[0].incarnation))
            if isinstance(instead, Chosen):
                chosen = instead
                break
            del soonest[0]  # no decode worker reads from it
        hope = min((expect(one, hopeful=True) for one in soonest), key=lambda one: one.seconds)
        if hope.seconds > self._margin * seconds_left:
            raise DeadlineTooNear(hope.queue_seconds, hope.prompt_seconds, seconds_left)
        return chosen

    def _best(self, demand: Demand) -> Iterator[Candidate]:
        """The best workers that can take the prompt now.

        Decode workers are among them only while idle: else they compute prompts in small chunks, if
        at all.
        """
        for role in self._roles:
            for one in islice(self._order.computing(role, demand), _COMPARED):
                if role is not WorkerRole.DECODE or not one.num_requests:
                    yield one

    def _expect(
        self, demand: Demand, speeds: StepSpeeds, one: Candidate, *, hopeful: bool = False
    ) -> ExpectedPrompt:
        """The expected time of the prompt on a worker; `speeds` stand in for unknown ones.

        With `hopeful`, this prompt and those before it count as cached as well as the luckiest one
        lately.
        """
        queue = self._workers.queue_of(one)
        cached = self._workers.hit_tokens(one, demand.to_compute_on(queue.role))
        load = queue.load if hopeful else replace(queue.load, reused_share=0.0)
        if not load.speeds.prompts_known:
            load = replace(load, speeds=speeds)
        queue = replace(queue, load=load)
        return expect_prompt(queue, demand.input_tokens, demand.priority, cached)
