"""What a router submits, for engines that are given it without a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.engine.scheduler.commands import Submit
from kvrelay.engine.scheduler.outbox import RouterLink
from kvrelay.wire.submit import (
    GenerationParams,
    RequestKey,
    SamplingParams,
    StopConditions,
    SubmitRequest,
)


def submit(
    link: RouterLink,
    key: RequestKey,
    prompt: Sequence[int],
    stops: StopConditions,
    sampling: SamplingParams | None = None,
    *,
    emitted: Sequence[int] = (),
    n: int = 1,
    prompt_logprobs: int | None = None,
    arrived: float = 0.0,
    **more: Any,
) -> Submit:
    """Make the command of a submission; `more` are fields of `SubmitRequest`."""
    sampling = sampling or SamplingParams(temperature=0)
    params = GenerationParams(sampling, stops, n, None if emitted else prompt_logprobs)
    submission = SubmitRequest(
        key, (*prompt, *emitted), len(prompt), params, first_choice=key.choice, **more
    )
    return Submit(link, submission, arrived)
