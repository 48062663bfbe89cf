"""Keeps requests from workers that are too late for their deadlines; refuses them if all are."""

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
"""Workers of each role, those that placement would choose first: a choice must not take long."""


class DeadlineCheck:
    """Moves a request to a worker that has its first token in time, before workers hear of it.

    Only the first token counts: a client may want what comes before its deadline, and nobody
    knows how much output there will be. Workers are compared by what they have of this prompt;
    what they had of others lately, of whichever tenant, only keeps it from being refused.

    Args:
        fleet: the workers.
        margin: so many times what a deadline leaves may be expected; 0: nothing is checked.
    """

    def __init__(self, fleet: Fleet, margin: float) -> None:
        self._fleet = fleet
        self._margin = margin

    def place(
        self, request: GenerationRequest, placement: Placement, deadline: float | None
    ) -> Placement:
        """The same placement if its first token is expected in time, else the soonest one.

        Args:
            request: about to be submitted.
            placement: that was chosen for it, whatever its deadline.
            deadline: of its call, on the clock of `time.monotonic`; None: it has none.

        Raises:
            DeadlineTooNear: even the soonest is too late, by far.
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
        """What the prompt is expected to take there, with these speeds if none are known.

        Hopeful: as if it and those before it were cached as well as the luckiest one lately.
        """
        marks = demand.reusable_on(link.endpoint.role)
        cached = self._fleet.prefixes.hit_tokens(link.endpoint.incarnation, marks)
        queue = link.prompt_queue
        load = queue.load if hopeful else replace(queue.load, reused_share=0.0)
        if not load.speeds.prompts_known:
            load = replace(load, speeds=speeds)
        queue = replace(queue, load=load)
        return expect_prompt(queue, demand.input_tokens, request.priority, cached)
