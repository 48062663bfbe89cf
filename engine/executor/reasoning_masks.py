"""The masks of tokens around the end of an output's reasoning, and of the end that is forced."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from kvrelay.model_runner.sampling.sampler import TokenMasks
from kvrelay.text.reasoning_progress import GAPS, ReasoningPhase, ReasoningProgress
from kvrelay.wire.submit import GenerationParams, Reasoning


class ReasoningMasks:
    """The tokens that requests' texts around reasoning are made of, in a worker's vocabulary.

    Args:
        tokenizer: the vocabulary.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = lru_cache(1 << 16)(self._find_bytes_of)
        self.tokens_of = lru_cache(1024)(self._tokens_of)
        self._without_whole_ends = lru_cache(256)(self._find_without_whole_ends)
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

    def that_say_no_more(
        self, progress: ReasoningProgress, params: GenerationParams
    ) -> TokenMasks | None:
        """The mask of all tokens but those that end the reasoning, and have text of what follows.

        None: there are no such tokens, or the reasoning has ended.
        """
        if progress.phase is not ReasoningPhase.INSIDE:
            return None
        mask = self._without_whole_ends(_reasoning_of(params).ends)
        vocabulary = self._vocabulary
        if rests := progress.unfinished_ends(vocabulary.longest):
            more = np.concatenate([vocabulary.that_begin_with(rest) for rest in rests])
            if len(more):
                mask = vocabulary.all_allowed() if mask is None else mask.copy()
                _forbid(mask, more)
        return mask

    def may_end_otherwise(
        self, progress: ReasoningProgress, params: GenerationParams, token_id: int
    ) -> bool:
        """Whether a token may end the reasoning, or its absence, with what the grammar reads."""
        if progress.phase is ReasoningPhase.UNDECIDED:
            return True
        is_before = (
            self._bytes_of(token_id).decode(errors="replace") in _reasoning_of(params).ends_before
        )
        mask = self.that_say_no_more(progress, params)
        return is_before or (mask is not None and not _allows(mask, token_id))

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        return _Vocabulary(map(self._bytes_of, range(self._tokenizer.vocab_size)))

    def _find_without_whole_ends(self, ends: tuple[str, ...]) -> TokenMasks | None:
        """The mask of all tokens but those with an end and more; None: there are none."""
        more = np.concatenate([self._vocabulary.that_have(end.encode()) for end in ends])
        if not len(more):
            return None
        mask = self._vocabulary.all_allowed()
        _forbid(mask, more)
        return mask

    def _find_bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.decode_bytes([token_id])

    def _tokens_of(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.tokenize_str(text, parse_special=True))


class _Vocabulary:
    """All tokens by their bytes, searched at a cost that no client's texts can make large.

    Args:
        tokens: the bytes of each token.
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        by_bytes = sorted((data, token_id) for token_id, data in enumerate(tokens))
        self._tokens = [data for data, _ in by_bytes]
        """The tokens in order."""
        self._ids = np.array([token_id for _, token_id in by_bytes], np.int64)
        lengths = np.array([len(data) for data in self._tokens], np.int64)
        self._said = np.array([len(data.rstrip()) for data in self._tokens], np.int64)
        """The length of each token without the white space at its end."""
        self._ends = lengths.cumsum()
        self._begins = self._ends - lengths
        self._text = np.frombuffer(b"".join(self._tokens), np.uint8)
        self.longest = int(lengths.max(initial=0))
        """The bytes of the longest token."""

    def all_allowed(self) -> TokenMasks:
        """Make a mask that allows all tokens."""
        return np.full(-(-len(self._ids) // 32), -1, np.int32)

    def that_begin_with(self, text: bytes) -> npt.NDArray[np.int64]:
        """Find the tokens that begin with a text and say more behind it."""
        first = bisect_left(self._tokens, text)
        last = bisect_left(self._tokens, text + b"\xff" * self.longest, first)
        return self._ids[first:last][self._said[first:last] > len(text)]

    def that_have(self, text: bytes) -> npt.NDArray[np.int64]:
        """Find the tokens that have a text somewhere, and say more behind it."""
        places = np.arange(len(self._text) - len(text) + 1)
        for number, byte in enumerate(text):
            places = places[self._text[places + number] == byte]
        owners = np.searchsorted(self._ends, places, side="right")
        behind = places - self._begins[owners] + len(text)
        return self._ids[owners[behind < self._said[owners]]]


def _reasoning_of(params: GenerationParams) -> Reasoning:
    """The reasoning of outputs that have some."""
    reasoning = params.stops.reasoning
    assert reasoning is not None
    return reasoning


def allow(mask: TokenMasks, token_ids: Sequence[int]) -> None:
    """Allow tokens in one mask, ``[words]``."""
    for token_id in token_ids:
        mask.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _forbid(mask: TokenMasks, token_ids: npt.NDArray[np.int64]) -> None:
    """Forbid tokens in one mask, ``[words]``."""
    bits = np.uint32(1) << (token_ids & 31).astype(np.uint32)
    np.bitwise_and.at(mask.view(np.uint32), token_ids >> 5, ~bits)


def _allows(mask: TokenMasks, token_id: int) -> bool:
    """Whether one mask, ``[words]``, allows a token."""
    return bool(mask.view(np.uint32)[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))
