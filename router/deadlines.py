"""Keeps requests from workers that are too late for their deadlines; refuses them if all are."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Final

from kvrelay.router.demand import Demand
from kvrelay.router.errors import DeadlineTooNear, Unavailable
from kvrelay.router.estimate import ExpectedPrompt, expect_prompt
from kvrelay.router.fleet import Fleet, Placement
from kvrelay.router.generation import GenerationRequest
from kvrelay.router.worker_link import WorkerLink
from kvrelay.wire.speeds import StepSpeeds

_ASKED: Final = 32
"""Workers of each role, those that placement would choose first: a choice must not take long."""


class DeadlineCheck:
    """Moves a request to a worker that has its first token in time, before workers hear of it.

    Only the first token counts: a client may want what comes before its deadline, and nobody
    knows how much output there will be.

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
        speeds = chosen.load.speeds
        if self._expect(request, demand, chosen, speeds).seconds <= left:
            return placement
        expected = [
            (self._expect(request, demand, link, speeds), link)
            for link in {chosen, *self._fleet.prompt_links_for(demand, _ASKED)}
        ]
        for one, link in sorted(expected, key=lambda e: (e[0].seconds, e[1] is not chosen)):
            if one.seconds > self._margin * left:
                raise DeadlineTooNear(one.queue_seconds, one.prompt_seconds, left)
            if link is chosen:
                break
            with contextlib.suppress(Unavailable):  # no decode worker reads from it
                return self._fleet.place(replace(demand, computed_by=link.endpoint.incarnation))
        return placement

    def _expect(
        self, request: GenerationRequest, demand: Demand, link: WorkerLink, speeds: StepSpeeds
    ) -> ExpectedPrompt:
        """What the prompt is expected to take there, with these speeds if none are known."""
        marks = demand.reusable_on(link.endpoint.role)
        cached = self._fleet.prefixes.hit_tokens(link.endpoint.incarnation, marks)
        queue = link.prompt_queue
        if not queue.load.speeds.prompts_known:
            queue = replace(queue, load=replace(queue.load, speeds=speeds))
        return expect_prompt(queue, demand.input_tokens, request.priority, cached)
