"""The fork of a request whose prompt is computed into one request for each choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.running_batch import GeneratingRequest, RunningBatch

RequestT = TypeVar("RequestT", bound=GeneratingRequest)


def fork_and_run(
    context: SchedulerContext[RequestT],
    running: RunningBatch[RequestT],
    growth: GrowthReserve,
    request: RequestT,
    first_tokens: Sequence[tuple[int, int]],
) -> None:
    """Make one request of each choice, with a lease of its own, and add them to the batch.

    The choices share the pages of the input. If memory is short, all but the first are retracted.

    Args:
        context: gets the choices as live requests.
        running: gets them as requests that generate.
        growth: learns from a retraction.
        request: stands for all choices until now, and for the first of `first_tokens` from now on.
            All of its input's KV is written.
        first_tokens: choices and their first tokens, which did not end them; not empty.
    """
    others = [_copy_for_choice(request, choice) for choice, _ in first_tokens[1:]]
    context.rekey_to_choice(request, first_tokens[0][0])
    for other in others:
        context.requests[other.key] = other
    request.kv_written_len = request.input_len
    request.check_lengths()
    has_memory = not others or context.fork(request, others)
    for one, (_, token_id) in zip([request, *others], first_tokens, strict=True):
        one.output_ids.append(token_id)
        one.checker.check(token_id)
        if one is request or has_memory:
            running.add(one)
        else:
            growth.learn_from_retraction()
            running.retract(one)


def _copy_for_choice(request: RequestT, choice: int) -> RequestT:
    """Copy the request for one choice alone, without memory."""
    if request.trace is not None:
        request.trace.share()
    return replace(
        request,
        key=request.key.of_choice(choice),
        choices=(choice,),
        output_ids=list(request.output_ids),
        checker=request.checker.again(request.output_ids),
        lease=None,
    )
