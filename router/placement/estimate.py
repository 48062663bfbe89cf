"""The expected time to compute a prompt, from a worker's queue and learnt speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvrelay.wire.load import WorkerLoad, sum_by_size
from kvrelay.wire.speeds import StepWork
from kvrelay.wire.worker_info import WorkerRole


@dataclass(frozen=True, slots=True)
class ExpectedPrompts:
    """The prompts that a worker has to compute, as a router knows them."""

    role: WorkerRole
    load: WorkerLoad
    """The worker's latest reported load."""
    sent: Sequence[int] = ()
    """Tokens of each prompt that was sent to the worker since that report."""
    backlog_tokens: float = math.inf
    """An upper bound on the tokens left to compute of all prompts in `by_size`."""

    @property
    def by_size(self) -> Sequence[int]:
        """The prompts that the worker has reported, and those sent to it since, by size.

        The form is that of `WorkerLoad.prompts_by_size`.
        """
        reported, sent = self.load.prompts_by_size, sum_by_size(self.sent)
        return [sum(both) for both in zip_longest(reported, sent, fillvalue=0)]


@dataclass(frozen=True, slots=True)
class ExpectedPrompt:
    """The expected time of a prompt's computation on one worker."""

    queue_seconds: float
    """Seconds for prompts that are computed before it, or beside it."""
    prompt_seconds: float
    """Seconds for its own tokens."""

    @property
    def seconds(self) -> float:
        """Seconds until its first token."""
        return self.queue_seconds + self.prompt_seconds


def expect_prompt(
    queue: ExpectedPrompts, tokens: int, priority: int = 0, cached_tokens: int = 0
) -> ExpectedPrompt:
    """Estimate a prompt's time on a worker; zero if it has measured no prompts.

    The estimate is rather too low than too high. A worker that reuses prefixes is assumed to reuse
    as much as of the luckiest of the latest prompts. The router may not know what the worker has
    cached of this one. A prompt with a priority is assumed to wait for no other.

    Args:
        queue: the worker's.
        tokens: the prompt's length, at least 1.
        priority: the request's.
        cached_tokens: tokens of the prompt that the worker is known to have.
    """
    load = queue.load
    speeds, computed_share = load.speeds, 1 - load.reused_share
    if not speeds.prompts_known:
        return ExpectedPrompt(0.0, 0.0)
    own = min(math.ceil(tokens * computed_share), max(tokens - cached_tokens, 1))
    rows = 0 if queue.role is WorkerRole.PREFILL else load.running_requests
    work = StepWork.of_prompt(own, tokens - own)
    prompt_seconds = speeds.seconds_of(StepWork(work.prompt_tokens, work.prompt_pairs, rows))
    if priority < 0:
        return ExpectedPrompt(0.0, prompt_seconds)
    ahead = tokens_ahead(queue.by_size, tokens) * computed_share
    ahead = math.ceil(min(ahead, queue.backlog_tokens))
    # They are assumed to be as long as this one, so each attends to as many tokens.
    pairs = ahead * work.prompt_pairs // max(own, 1)
    return ExpectedPrompt(
        speeds.seconds_of(StepWork(ahead, pairs, rows)) if ahead else 0.0, prompt_seconds
    )


def tokens_ahead(by_size: Sequence[int], tokens: int) -> int:
    """Tokens computed before the last one of a new prompt of `tokens` tokens.

    A worker gives half of each step to the prompt whose turn it is and the rest to the shortest. So
    all prompts that are not longer come before it. The same steps compute as many tokens of longer
    prompts, if there are as many. The lengths within one size are assumed to be spread evenly.

    Args:
        by_size: see `WorkerLoad.prompts_by_size`.
        tokens: the prompt's length, at least 1.
    """
    size = tokens.bit_length() - 1
    part = (tokens + 1) / (1 << size) - 1  # the part of its own size's range that is not longer
    like_it = by_size[size] if size < len(by_size) else 0
    # The same part of that size's prompts is not longer, with a smaller part of the tokens.
    shorter = sum(by_size[:size]) + math.ceil(like_it * part * (1 + part) / 2)
    return shorter + min(sum(by_size) - shorter, shorter + tokens)


def most_tokens_ahead(by_size: Sequence[int], tokens: int) -> int:
    """An upper bound for `tokens_ahead`: all prompts of its own size come first.

    The bound is exact where all prompts are equally long. Elsewhere it is too high for every
    worker, which does not matter to a choice among workers. Too low an estimate for one of them
    would.
    """
    size = tokens.bit_length()
    first = sum(by_size[:size])
    return first + min(sum(by_size[size:]), first + tokens)
