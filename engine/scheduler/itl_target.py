"""The bound on prompt chunks beside the running batch, which keeps its inter-token latency."""

from __future__ import annotations

from kvrelay.engine.scheduler.speed_learner import SpeedLearner
from kvrelay.pacing.chunk_size import LatencyTargets, WaitingPrompts, choose_chunk_tokens
from kvrelay.wire.speeds import StepWork


class ItlTarget:
    """The target time between two tokens of a request while prompts are computed beside it.

    Args:
        targets: the latencies that the user has set. Without an inter-token latency that of a step
            follows from the time of steps without prompts, and from how long prompts have waited.
        learner: knows what steps cost.
        own_prompts: whether most prompts are this worker's own to compute, not another's. If so,
            they take fewer and longer steps beside few requests and beside many.
    """

    def __init__(
        self, targets: LatencyTargets, learner: SpeedLearner, *, own_prompts: bool
    ) -> None:
        self._targets = targets
        self._learner = learner
        self._own_prompts = own_prompts

    def most_prompt_tokens(
        self, rows: StepWork, context: int, most: int, backlog_tokens: int, waiting: WaitingPrompts
    ) -> int:
        """Compute the most prompt tokens of a step that keep the target, at least a few.

        Args:
            rows: what the step computes beside the prompt.
            context: tokens before those of the prompt.
            most: prompt tokens that the step may compute at all.
            backlog_tokens: of prompts that have memory, as `count_backlog` counts them.
            waiting: those of them without a first token.
        """
        return choose_chunk_tokens(
            self._learner.speeds,
            rows,
            context,
            most,
            backlog_tokens,
            self._targets,
            waiting=waiting,
            own_prompts=self._own_prompts,
        )
