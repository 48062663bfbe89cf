"""Bounds the chunks of prompts beside the running batch, so that it keeps its pace."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvrelay.engine.scheduler.speed_learner import SpeedLearner
from kvrelay.wire.speeds import StepWork

_LEAST_TOKENS: Final = 16
"""Prompt tokens of a step in any case, so that prompts end."""
_IDLE_STEPS: Final = 3
"""By default, a step with prompts may take as long as so many steps of one request alone."""
_OWN_STEPS: Final = 2
"""And at least as long as so many steps of its batch without prompts: beside a large batch
prompts would starve otherwise."""


class ItlTarget:
    """The seconds from a token of a request to its next one while prompts are computed beside it.

    Args:
        seconds: that such a step may take; None: as follows from steps without prompts.
        learner: knows what steps cost.
    """

    def __init__(self, seconds: float | None, learner: SpeedLearner) -> None:
        self._seconds = seconds
        self._learner = learner

    def most_prompt_tokens(self, rows: StepWork, context: int, most: int) -> int:
        """The most prompt tokens of a step that keep the target, at least a few.

        Args:
            rows: what the step computes beside the prompt.
            context: tokens before those of the prompt.
            most: prompt tokens that the step may compute at all.
        """
        speeds = self._learner.speeds
        bound = self._seconds or max(
            _IDLE_STEPS * speeds.step_seconds(1), _OWN_STEPS * speeds.seconds_of(rows)
        )
        keeps, breaks = min(_LEAST_TOKENS, most), most + 1
        while breaks - keeps > 1:
            tokens = (keeps + breaks) // 2
            chunk = StepWork.of_prompt(tokens, context)
            work = replace(chunk, rows=rows.rows, row_pairs=rows.row_pairs)
            if speeds.seconds_of(work) <= bound:
                keeps = tokens
            else:
                breaks = tokens
        return keeps
