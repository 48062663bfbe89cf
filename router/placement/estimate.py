"""When a worker is expected to have computed a prompt: from its queue and its learnt speeds."""

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
    """As the worker reported it last."""
    sent: Sequence[int] = ()
    """Tokens of each prompt that was sent to the worker since then."""
    backlog_tokens: float = math.inf
    """No more than these are left to compute, of all in `by_size`."""

    @property
    def by_size(self) -> Sequence[int]:
        """The prompts that the worker has reported, and those that it was sent since then.

        As in `WorkerLoad.prompts_by_size`.
        """
        reported, sent = self.load.prompts_by_size, sum_by_size(self.sent)
        return [sum(both) for both in zip_longest(reported, sent, fillvalue=0)]


@dataclass(frozen=True, slots=True)
class ExpectedPrompt:
    """What the computation of a prompt is expected to take on one worker."""

    queue_seconds: float
    """For prompts that are computed before it, or beside it."""
    prompt_seconds: float
    """For its own tokens."""

    @property
    def seconds(self) -> float:
        """Until its first token."""
        return self.queue_seconds + self.prompt_seconds


def expect_prompt(
    queue: ExpectedPrompts, tokens: int, priority: int = 0, cached_tokens: int = 0
) -> ExpectedPrompt:
    """What a prompt is expected to take on a worker; nothing, if that has measured no prompts.

    It is rather too little than too much. A worker that does reuse prefixes is taken to reuse
    as much as it did of the luckiest of the latest prompts, as the router may not know
    what it has of this one; and nothing else waits before a prompt with a priority.

    Args:
        queue: of the worker.
        tokens: of the prompt, one or more.
        priority: of its request.
        cached_tokens: of the prompt, that the worker is known to have.
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
    # They are taken to be as long as this one, and so to attend to as much each.
    pairs = ahead * work.prompt_pairs // max(own, 1)
    return ExpectedPrompt(
        speeds.seconds_of(StepWork(ahead, pairs, rows)) if ahead else 0.0, prompt_seconds
    )


def tokens_ahead(by_size: Sequence[int], tokens: int) -> int:
    """Tokens that are computed before the last one of a prompt of so many that comes now.

    A worker gives half of each step to the prompt whose turn it is and the rest to the
    shortest. So all that are not longer come before it, and of longer ones as much as
    is computed beside these and itself. The lengths of one size are taken to lie evenly.

    Args:
        by_size: as in `WorkerLoad.prompts_by_size`.
        tokens: of the prompt, one or more.
    """
    size = tokens.bit_length() - 1
    part = (tokens + 1) / (1 << size) - 1  # of its own size's range that is not longer
    like_it = by_size[size] if size < len(by_size) else 0
    # They have as large a part of the prompts as of the range, and less of the tokens.
    shorter = sum(by_size[:size]) + math.ceil(like_it * part * (1 + part) / 2)
    return shorter + min(sum(by_size) - shorter, shorter + tokens)


def most_tokens_ahead(by_size: Sequence[int], tokens: int) -> int:
    """As `tokens_ahead`, but all prompts of its own size come first.

    So it is where all prompts are equally long. Where they are not, it is too much for every
    worker, which does not matter to a choice among them; too little on one of them does.
    """
    size = tokens.bit_length()
    first = sum(by_size[:size])
    return first + min(sum(by_size[size:]), first + tokens)
