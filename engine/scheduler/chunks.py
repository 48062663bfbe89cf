"""Divides a step's token budget among prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvrelay.engine.scheduler.request import Request

RequestT = TypeVar("RequestT", bound=Request)


def share_budget(left: Mapping[RequestT, int], budget: int) -> list[tuple[RequestT, int]]:
    """Divide a step's token budget among prompts.

    Half of it is for the prompt whose turn it is, so that it ends in bounded
    time. The rest is for those that have less left to compute than that one, the
    shortest first, so that a long prompt does not starve short ones. What they
    leave is the first one's, and then the others': prompts of one length end one
    after the other, not all together at the end.

    Args:
        left: for each prompt its tokens that are in no step yet, one or more.
        budget: tokens of the step, one or more.

    Returns:
        Prompts with one token or more, in the order of their turns.
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
