"""How fast a worker computes, as it has learnt from its own steps: what estimates are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass


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


UNMEASURED = StepSpeeds()
"""Of a worker that has measured nothing yet."""
