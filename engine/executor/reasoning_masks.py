"""The masks of tokens around the end of an output's reasoning, and of the end that is forced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from llguidance import LLTokenizer

from kvrelay.model_runner.sampling.sampler import TokenMasks
from kvrelay.text.reasoning_progress import GAPS, ReasoningPhase, ReasoningProgress
from kvrelay.wire.submit import GenerationParams, Reasoning

_NONE: Final[Sequence[int]] = ()


class ReasoningMasks:
    """The tokens that requests' texts around reasoning are made of, in a worker's vocabulary.

    Args:
        tokenizer: the vocabulary.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[bytes] = []
        self.tokens_of = lru_cache(1024)(self._tokens_of)
        self._that_say_more = lru_cache(256)(self._find_that_say_more)
        self._gaps = {
            found[0]: len(gap) for gap in GAPS if len(found := self._tokens_of(gap.decode())) == 1
        }

    def begin(self, reasoning: Reasoning) -> ReasoningProgress:
        """The beginning of an output that may begin with reasoning."""
        return ReasoningProgress(reasoning, self._bytes_of)

    def gaps(self, progress: ReasoningProgress) -> Sequence[int]:
        """The line breaks that may come next, before what follows the reasoning."""
        left = progress.gap_left
        return [token_id for token_id, length in self._gaps.items() if length <= left]

    def openings(self, params: GenerationParams, output_ids: Sequence[int]) -> Sequence[int]:
        """The tokens that go on with a text that begins the reasoning, a line break before it."""
        begins = _reasoning_of(params).begins
        ways = [self.tokens_of(space + one) for one in begins for space in ("", "\n")]
        count, begun = len(output_ids), tuple(output_ids)
        return [way[count] for way in ways if len(way) > count and way[:count] == begun]

    def forced(self, progress: ReasoningProgress, params: GenerationParams) -> int | None:
        """The token that must come next, as the budget is spent; None: any may come."""
        budget = params.sampling.thinking_token_budget
        if budget is None or progress.phase is not ReasoningPhase.INSIDE:
            return None
        place = progress.num_thought - budget
        if place < 0:
            return None
        written = self.tokens_of(_reasoning_of(params).written_end)
        return written[place] if place < len(written) else None

    def that_say_more(self, progress: ReasoningProgress, params: GenerationParams) -> Sequence[int]:
        """The tokens that would end the reasoning, and have text of what follows."""
        if progress.phase is not ReasoningPhase.INSIDE:
            return _NONE
        return self._that_say_more(_reasoning_of(params).ends, progress.unfinished_ends)

    def may_end_otherwise(
        self, progress: ReasoningProgress, params: GenerationParams, token_id: int
    ) -> bool:
        """Whether a token may end the reasoning, or its absence, with what the grammar reads."""
        if progress.phase is ReasoningPhase.UNDECIDED:
            return True
        is_before = (
            self._bytes_of(token_id).decode(errors="replace") in _reasoning_of(params).ends_before
        )
        return is_before or token_id in self.that_say_more(progress, params)

    def _find_that_say_more(self, ends: tuple[str, ...], rests: frozenset[bytes]) -> Sequence[int]:
        """The tokens with more than an end, if the `rests` of ends would complete some.

        It looks at all tokens: few ends are in use, and reasoning seldom has a part of one.
        """
        if not self._tokens:
            self._tokens = list(map(self._bytes_of, range(self._tokenizer.vocab_size)))
        tokens, begins = self._tokens, tuple(rests)
        near = [one for one, token in enumerate(tokens) if token.startswith(begins)]
        found = {one for one in near if _says_more(tokens[one], rests)}
        for end in map(str.encode, ends):
            inside = [one for one, token in enumerate(tokens) if end in token]
            found.update([one for one in inside if tokens[one].partition(end)[2].strip()])
        return sorted(found)

    def _bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.decode_bytes([token_id])

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.tokenize_str(text, parse_special=True))


def _says_more(token: bytes, rests: Iterable[bytes]) -> bool:
    behind = [token[len(rest) :] for rest in rests if token.startswith(rest)]
    return any(text.strip() for text in behind)


def _reasoning_of(params: GenerationParams) -> Reasoning:
    """The reasoning of outputs that have some."""
    reasoning = params.stops.reasoning
    assert reasoning is not None
    return reasoning


def allow(mask: TokenMasks, token_ids: Sequence[int]) -> None:
    """Allow tokens in one mask, ``[words]``."""
    for token_id in token_ids:
        mask.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def forbid(mask: TokenMasks, token_ids: Sequence[int]) -> None:
    """Forbid tokens in one mask, ``[words]``."""
    for token_id in token_ids:
        mask.view(np.uint32)[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
