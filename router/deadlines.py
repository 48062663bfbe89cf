"""Refuses requests whose deadline is too near for a first token, before workers hear of them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from kvrelay.router.errors import DeadlineTooNear
from kvrelay.router.estimate import PromptQueue, expect_prompt
from kvrelay.router.generation import GenerationRequest


def check_deadline(
    request: GenerationRequest,
    deadline: float | None,
    workers: Iterable[tuple[PromptQueue, int]],
    margin: float,
) -> None:
    """Raises `DeadlineTooNear` if no first token can be expected in time, by far.

    Only the first token counts: a client may want what comes before its deadline, and nobody
    knows how much output there will be.

    Args:
        request: about to be submitted.
        deadline: of its call, on the clock of `time.monotonic`; None: it has none.
        workers: of which one is to compute its prompt: what waits there, and tokens of the prompt
            that it has; may be empty.
        margin: so many times what is left may be expected; 0: anything.
    """
    if deadline is None or not margin:
        return
    tokens, priority = len(request.input_ids), request.priority
    expected = [expect_prompt(queue, tokens, priority, cached) for queue, cached in workers]
    soonest = min(expected, key=lambda one: one.seconds, default=None)
    left = max(deadline - time.monotonic(), 0.0)
    if soonest is not None and soonest.seconds > margin * left:
        raise DeadlineTooNear(soonest.queue_seconds, soonest.prompt_seconds, left)
