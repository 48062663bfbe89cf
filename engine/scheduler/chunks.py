"""The division of a step's token budget among prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvrelay.engine.scheduler.request import Request

RequestT = TypeVar("RequestT", bound=Request)


def share_budget(left: Mapping[RequestT, int], budget: int) -> list[tuple[RequestT, int]]:
    """Divide a step's token budget among prompts.

    Half of it is for the prompt whose turn it is, so that it ends in bounded time. The other half
    is for prompts that have fewer tokens left to compute, the shortest first. So a long prompt does
    not starve short ones.

    What is left after them goes to the first prompt, and then to the others. Prompts of one length
    end one after the other, not all together.

    Args:
        left: for each prompt its tokens that are in no step yet, one or more.
        budget: tokens of the step, one or more.

    Returns:
        The prompts that get any tokens, with their tokens, in the order of their turns.
    """
    shares: dict[RequestT, int] = {}

    def assign(request: RequestT, most: int) -> None:
        nonlocal budget
        share = min(left[request] - shares.get(request, 0), most, budget)
        if share > 0:
            shares[request] = shares.get(request, 0) + share
            budget -= share

    in_turn: Sequence[RequestT] = sorted(left, key=lambda r: r.turn)
    for request in in_turn[:1]:
        assign(request, (budget + 1) // 2)
    others = sorted(in_turn[1:], key=lambda r: (r.priority, left[r], r.arrived))
    for request in others:
        if left[request] < left[in_turn[0]]:
            assign(request, budget)
    for request in (*in_turn[:1], *others):
        assign(request, budget)
    return [(request, shares[request]) for request in in_turn if request in shares]
