"""Text that can be streamed, made from output tokens.

It has two stages: a detokenizer that never splits a character, and a buffer that holds back text
that may still become a stop string. The worker decides where a request stops; here no part of a
stop string is streamed before that.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from kvrelay.text.detokenizer import Detokenizer
from kvrelay.text.reasoning_progress import ReasoningProgress


class TextStream:
    """The text of one output, token by token.

    Everything returned, joined, is the tokenizer's own decoding of the pushed
    tokens, cut where the matched stop string begins.

    Do not push the token id that ended the request (end of sequence or one of `stop_token_ids`). As
    in vLLM, it is among the output's token ids and counted in the usage, but has no text.

    Args:
        tokenizer: a shared tokenizer, which only decodes here.
        stop: stop strings; none is ever returned, nor a part of one that is completed.
        min_tokens: a stop string that is completed before this many tokens is ordinary text, as it
            is for the worker.
        skip_special_tokens: whether to leave special tokens out of the text.
        thinking: the reasoning, in which stop strings are ordinary text; None: there is none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        thinking: ReasoningProgress | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._buffer = StopStringBuffer(stop)
        self._min_tokens = min_tokens
        self._thinking = thinking
        self._pushed = 0

    def push(self, token_id: int) -> str:
        """Add a token; return the text that can be streamed now, often none."""
        self._pushed += 1
        piece = self._detokenizer.push(token_id)
        if self._thinking is not None and not self._thinking.push(token_id):
            return self._buffer.finish(piece, None)
        return self._buffer.push(piece, may_stop=self._pushed >= self._min_tokens)

    @property
    def matched(self) -> str | None:
        """The stop string that the text has reached, which ends the output; None: none yet."""
        return self._buffer.matched

    def finish(self, matched_stop: str | None = None) -> str:
        """Return the rest of the text, up to `matched_stop` if that ended the output."""
        return self._buffer.finish(self._detokenizer.finish(), matched_stop)


class StopStringBuffer:
    """A buffer of text that holds back what may still become a stop string.

    The text is ``passed on | held``. `held` begins with the first stop string that has occurred or
    could still be completed.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    def push(self, piece: str, *, may_stop: bool) -> str:
        """Add a piece of text; return the text that can be passed on.

        A stop string that `piece` completes while `may_stop` is false is
        ordinary text, and so is everything before its end.
        """
        if not self._stop:
            return piece
        held = self._held + piece
        matches = [start for start in map(held.find, self._stop) if start >= 0]
        if not matches:
            cut = self._first_possible_start(held)
        else:
            cut = min(matches) if may_stop else len(held)
        self._held = held[cut:]
        return held[:cut]

    @property
    def matched(self) -> str | None:
        """The stop string that `held` begins with; of several, the one that a worker would name."""
        return min((stop for stop in self._stop if self._held.startswith(stop)), default=None)

    def finish(self, piece: str, matched_stop: str | None) -> str:
        """Add a last piece; return all held text, up to `matched_stop` if there is one."""
        held, self._held = self._held + piece, ""
        return held if matched_stop is None else held.partition(matched_stop)[0]

    def _first_possible_start(self, held: str) -> int:
        for start in range(max(0, len(held) - self._longest + 1), len(held)):
            tail = held[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return start
        return len(held)
