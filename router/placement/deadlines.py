"""Deadline checks: placement on workers in time for a deadline, and refusal if none is."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from functools import partial
from typing import Final

from kvrelay.router.errors import DeadlineTooNear, Unavailable
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.placement.demand import Demand
from kvrelay.router.placement.estimate import ExpectedPrompt, expect_prompt
from kvrelay.router.placement.fleet import Fleet, Placement
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.wire.speeds import StepSpeeds

_ASKED: Final = 32
"""The workers of each role to compare, the best of placement first: the check must be short."""


class DeadlineCheck:
    """The choice, before submission, of a worker that has the first token in time.

    Only the first token counts: a client may want the output up to its deadline, and nobody knows
    the output's length. Workers are compared by their cached prefix of this prompt. Their latest
    hit rate on other prompts, of any tenant, can only prevent a refusal.

    Args:
        fleet: the workers.
        margin: the most expected seconds, in multiples of the time that the deadline leaves; 0: no
            check.
    """

    def __init__(self, fleet: Fleet, margin: float) -> None:
        self._fleet = fleet
        self._margin = margin

    def place(
        self, request: GenerationRequest, placement: Placement, deadline: float | None
    ) -> Placement:
        """Return the placement if its first token is expected in time, else the soonest one.

        Args:
            request: about to be submitted.
            placement: the choice made without regard to the deadline.
            deadline: the call's, on the clock of `time.monotonic`; None: it has none.

        Raises:
            DeadlineTooNear: even the soonest placement is later than the margin allows.
        """
        if deadline is None or not self._margin:
            return placement
        left = max(deadline - time.monotonic(), 0.0)
        chosen, demand = placement.computes_prompt, Demand.of(request)
        expect = partial(self._expect, request, demand, chosen.load.speeds)
        if expect(chosen).seconds <= left:
            return placement
        links = sorted(
            {chosen, *self._fleet.prompt_links_for(demand, _ASKED)},
            key=lambda link: (expect(link).seconds, link is not chosen),
        )
        soonest = placement
        while links[0] is not chosen:
            with contextlib.suppress(Unavailable):  # no decode worker reads from it
                computed_by = links[0].endpoint.incarnation
                soonest = self._fleet.place(replace(demand, computed_by=computed_by))
                break
            del links[0]
        hope = min((expect(link, hopeful=True) for link in links), key=lambda one: one.seconds)
        if hope.seconds > self._margin * left:
            raise DeadlineTooNear(hope.queue_seconds, hope.prompt_seconds, left)
        return soonest

    def _expect(
        self,
        request: GenerationRequest,
        demand: Demand,
        speeds: StepSpeeds,
        link: WorkerLink,
        *,
        hopeful: bool = False,
    ) -> ExpectedPrompt:
        """The expected time of the prompt on a worker; `speeds` stand in for unknown ones.

        With `hopeful`, this prompt and those before it count as cached as well as the luckiest one
        lately.
        """
        marks = demand.reusable_on(link.endpoint.role)
        cached = self._fleet.prefixes.hit_tokens(link.endpoint.incarnation, marks)
        queue = link.prompt_queue
        load = queue.load if hopeful else replace(queue.load, reused_share=0.0)
        if not load.speeds.prompts_known:
            load = replace(load, speeds=speeds)
        queue = replace(queue, load=load)
        return expect_prompt(queue, demand.input_tokens, request.priority, cached)
