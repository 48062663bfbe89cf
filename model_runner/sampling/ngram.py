"""Drafts from the sequence itself: the tokens that followed its last n-gram before.

Answers about a text, edits of code and tables repeat much of their prompt. This is prompt look-up
decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). vLLM's n-gram proposer takes
the earliest occurrence of the longest n-gram, as most tokens follow it. Here it is the latest: what
was repeated last is likelier to be repeated now. A match near the end is continued periodically.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """One sequence's tokens, and the latest place of each n-gram that other tokens follow.

    4,096 tokens and three lengths of n-grams take about 1.4 MB.

    Args:
        min_ngram: the fewest tokens that must match (vLLM: `prompt_lookup_min`).
        max_ngram: the most tokens that are compared (vLLM: `prompt_lookup_max`).

    Raises:
        ValueError: a bound is out of range; the message begins with its name.
    """

    def __init__(self, min_ngram: int = 2, max_ngram: int = 4) -> None:
        if min_ngram < 1:
            raise ValueError(f"min_ngram must be at least 1, got {min_ngram}")
        if max_ngram < min_ngram:
            raise ValueError(f"max_ngram must be at least min_ngram ({min_ngram}), got {max_ngram}")
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._token_ids: list[int] = []
        # For all lengths together, without the sequence's last n-grams: nothing follows them.
        self._followers: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens, in time proportional to their number, however long the sequence is."""
        before, known = len(self._token_ids), self._token_ids
        known += token_ids
        for length in range(self._min_ngram, self._max_ngram + 1):
            for end in range(max(before, length), len(known)):
                self._followers[tuple(known[end - length : end])] = end

    def propose(self, count: int) -> list[int]:
        """Return `count` tokens that may come next, or none.

        The sequence ends with an n-gram; the proposal is what followed its latest earlier
        occurrence. The longest such n-gram is taken. A proposal that reaches the sequence's end
        goes on with its own tokens.
        """
        if count < 1:
            return []
        for length in range(min(self._max_ngram, len(self)), self._min_ngram - 1, -1):
            first = self._followers.get(tuple(self._token_ids[-length:]))
            if first is not None:
                followers = self._token_ids[first : first + count]
                times = -(-count // len(followers))
                return (followers * times)[:count]
        return []
