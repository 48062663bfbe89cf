"""The speeds of a worker, learnt from its own steps, and the estimates made from them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one or several steps: chunks of prompts, and rows that generate."""

    prompt_tokens: int = 0
    prompt_pairs: int = 0
    """Pairs of a prompt token and a token that it attends to, over all `prompt_tokens`."""
    rows: int = 0
    """Sequences that generate."""
    row_pairs: int = 0
    """Tokens that these rows attend to, together."""

    @classmethod
    def of_prompt(cls, tokens: int, context: int = 0) -> StepWork:
        """The work of `tokens` of one prompt, behind `context` tokens whose KV exists."""
        return cls(tokens, tokens * context + tokens * (tokens + 1) // 2)


NO_WORK = StepWork()


@dataclass(frozen=True, slots=True)
class StepSpeeds:
    """The cost of a step on one worker: a sum of parts that grow with its work.

    All parts are zero until something is measured: work is then expected to take no time.
    """

    seconds_per_step: float = 0.0
    """Seconds of any step, whatever it computes."""
    seconds_per_token: float = 0.0
    """Seconds to compute one token of a prompt."""
    seconds_per_pair: float = 0.0
    """Seconds for each pair of a prompt token and a token that it attends to."""
    seconds_per_row: float = 0.0
    """Seconds for each sequence that generates."""
    seconds_per_row_pair: float = 0.0
    """Seconds for each pair of a sequence that generates and a token that it attends to."""
    chunk_tokens: int = 0
    """The most prompt tokens of one step; 0: no limit."""
    prompts_known: bool = False
    """Steps with chunks of prompts were measured."""
    rows_known: bool = False
    """Steps with rows that generate were measured."""

    def seconds_of(self, work: StepWork) -> float:
        """The expected seconds of work, in as many steps as its prompt tokens need (1 or more)."""
        steps = math.ceil(work.prompt_tokens / self.chunk_tokens) if self.chunk_tokens else 1
        one_step = self.seconds_per_step
        one_step += work.rows * self.seconds_per_row + work.row_pairs * self.seconds_per_row_pair
        return (
            max(steps, 1) * one_step
            + work.prompt_tokens * self.seconds_per_token
            + work.prompt_pairs * self.seconds_per_pair
        )

    def prompt_seconds(self, tokens: int, context: int = 0) -> float:
        """The expected seconds to compute `tokens` of a prompt behind `context` others, alone."""
        return self.seconds_of(StepWork.of_prompt(tokens, context))

    def step_seconds(self, rows: int, context: int = 0) -> float:
        """The expected seconds of a step in which `rows` generate, behind `context` tokens each."""
        return self.seconds_of(StepWork(rows=rows, row_pairs=rows * context))


UNMEASURED = StepSpeeds()
"""The speeds of a worker that has measured nothing yet."""
