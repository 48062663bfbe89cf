"""How fast a worker computes, as it has learnt from its own steps: what estimates are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

_LEAST_TOKENS: Final = 16
"""Of a prompt in any step, so that prompts end."""
_UNMEASURED_TOKENS: Final = 64
"""Of prompts beside rows while nobody knows what they cost: that is known after a few steps."""
_IDLE_STEPS: Final = 2.5
"""By default, a step with prompts may take as long as so many steps of one request alone."""
_OWN_STEPS: Final = 1.5
"""And at least as long as so many steps of its batch without prompts: beside a large batch
prompts would starve otherwise."""
_BACKLOG_STEPS: Final = 6
"""A backlog is computed in so many steps beside a batch, so that its requests keep their pace."""
_MOST_IDLE_STEPS: Final = 16
"""But no step is longer than so many idle ones for the backlog's sake."""
_BACKLOG_ROWS: Final = 6
"""A worker whose prompts are its own computes them in fewer steps beside fewer rows than these, by
their square: a long step delays fewer requests, and a prompt waits for what each step costs beside
it."""
_MANY_ROWS: Final = 12
"""Beside so many rows such a worker does not spread a backlog: each step costs much beside prompts,
and where more of them come than short steps keep up with, each waits for seconds."""
_MANY_OWN_STEPS: Final = 6
"""A step there may take as long as so many of its batch without prompts."""
_MOST_OWN_IDLE_STEPS: Final = 24
"""But no longer than so many idle ones for that."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step, or several, compute: chunks of prompts and rows that generate."""

    prompt_tokens: int = 0
    prompt_pairs: int = 0
    """Of a prompt's token and one that it attends to, over all of these tokens."""
    rows: int = 0
    """Sequences that generate."""
    row_pairs: int = 0
    """Tokens that these attend to, together."""

    @classmethod
    def of_prompt(cls, tokens: int, context: int = 0) -> StepWork:
        """So many tokens of one prompt, behind `context` tokens whose KV is there."""
        return cls(tokens, tokens * context + tokens * (tokens + 1) // 2)


NO_WORK = StepWork()


@dataclass(frozen=True, slots=True)
class StepSpeeds:
    """What a step costs on one worker: a sum of parts that grow with its work.

    All is zero before anything was measured, so that nothing is expected to take any time.
    """

    seconds_per_step: float = 0.0
    """Whatever it computes."""
    seconds_per_token: float = 0.0
    """Of a prompt."""
    seconds_per_pair: float = 0.0
    """Of a prompt's token and one that it attends to."""
    seconds_per_row: float = 0.0
    """Of each sequence that generates."""
    seconds_per_row_pair: float = 0.0
    """Of a sequence that generates and a token that it attends to."""
    chunk_tokens: int = 0
    """The most prompt tokens of one step; 0: any number."""
    prompts_known: bool = False
    """Steps with chunks of prompts were measured."""
    rows_known: bool = False
    """Steps with rows that generate were measured."""

    def seconds_of(self, work: StepWork) -> float:
        """Expected seconds of work, in as many steps as its prompt tokens need, one at least."""
        steps = math.ceil(work.prompt_tokens / self.chunk_tokens) if self.chunk_tokens else 1
        one_step = self.seconds_per_step
        one_step += work.rows * self.seconds_per_row + work.row_pairs * self.seconds_per_row_pair
        return (
            max(steps, 1) * one_step
            + work.prompt_tokens * self.seconds_per_token
            + work.prompt_pairs * self.seconds_per_pair
        )

    def prompt_seconds(self, tokens: int, context: int = 0) -> float:
        """Expected seconds to compute so many tokens of a prompt behind `context` others, alone."""
        return self.seconds_of(StepWork.of_prompt(tokens, context))

    def step_seconds(self, rows: int, context: int = 0) -> float:
        """Expected seconds of a step in which `rows` generate, behind `context` tokens each."""
        return self.seconds_of(StepWork(rows=rows, row_pairs=rows * context))

    def most_tokens_beside(
        self,
        rows: StepWork,
        context: int,
        most: int,
        backlog_tokens: int,
        itl_target: float | None = None,
        *,
        own_prompts: bool = False,
    ) -> int:
        """The most tokens of a prompt beside rows that keep their pace so, a few at least.

        While no prompts were measured, few in any case.

        Args:
            rows: what the step computes beside the prompt.
            context: tokens of the prompt before those.
            most: tokens of the prompt that the step may compute at all.
            backlog_tokens: of prompts, as `make_backlog` counts them.
            itl_target: seconds that the step may take; None: as follows from the speeds, the rows
                and the backlog.
            own_prompts: the worker has nobody else to compute them. Without such a target the
                backlog then takes fewer steps beside few rows and beside many.
        """
        if not self.prompts_known:
            return min(_UNMEASURED_TOKENS, most)
        steps = float(_BACKLOG_STEPS)
        if own_prompts:
            steps = max(steps * min(rows.rows / _BACKLOG_ROWS, 1) ** 2, 1)
        part = math.ceil(backlog_tokens / steps)
        bound = itl_target or self._default_bound(rows, context, part)
        if own_prompts and rows.rows >= _MANY_ROWS and not itl_target:
            bound = max(bound, self._longest_bound(rows))
        keeps, breaks = min(_LEAST_TOKENS, most), most + 1
        while breaks - keeps > 1:
            tokens = (keeps + breaks) // 2
            if self._seconds_beside(rows, tokens, context) <= bound:
                keeps = tokens
            else:
                breaks = tokens
        return keeps

    def _default_bound(self, rows: StepWork, context: int, part_tokens: int) -> float:
        """Seconds that a step with prompts, so many tokens if it can, may take beside rows."""
        idle, own = self.step_seconds(1), self.seconds_of(rows)
        part = self._seconds_beside(rows, part_tokens, context)
        return max(_IDLE_STEPS * idle, _OWN_STEPS * own, min(part, _MOST_IDLE_STEPS * idle))

    def _longest_bound(self, rows: StepWork) -> float:
        """Seconds that a step with prompts may take beside many rows, where all are its own."""
        idle, own = self.step_seconds(1), self.seconds_of(rows)
        return min(_MANY_OWN_STEPS * own, _MOST_OWN_IDLE_STEPS * idle)

    def _seconds_beside(self, rows: StepWork, tokens: int, context: int) -> float:
        """Seconds of a step of rows with so many tokens of a prompt behind `context` others."""
        chunk = StepWork.of_prompt(tokens, context)
        work = replace(chunk, rows=rows.rows, row_pairs=rows.row_pairs)
        return self.seconds_of(work)


def make_backlog(longest_tokens: int, tokens_left: int) -> int:
    """The tokens of prompts that chunks beside rows are a part of.

    The longest prompt counts as a whole until it ends, so that its chunks do not become smaller and
    smaller; and a third of what is left of all, so that many prompts are computed in larger chunks.

    Args:
        longest_tokens: of the longest prompt that is not computed, what was computed included.
        tokens_left: of all prompts.
    """
    return max(longest_tokens, tokens_left // 3)


UNMEASURED = StepSpeeds()
"""Of a worker that has measured nothing yet."""
