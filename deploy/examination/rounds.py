"""Pairs of nodes in rounds, so that no node is in two pairs of one round."""

from __future__ import annotations

from collections.abc import Iterator


def rounds(number: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair of `number` nodes once, in rounds as in a round-robin tournament.

    The first one keeps its place, and the others move on by one after each round.
    """
    players = list(range(number + number % 2))
    half = len(players) // 2
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < number]
        players.insert(1, players.pop())
