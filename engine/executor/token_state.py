"""A request's tokens on the forward thread, which alone writes them once a step was launched.

A step that is planned before the one before it has ended cannot name its own
input: the token that it begins with is not sampled yet, and after a
verification of drafts it is not even known how many were. So a step says only
*whose* next tokens it computes; which ones they are, and where they go, is read
from the `TokenState` when the forward begins.

On a device even that may be too early: the step before has been launched and has not
run. If it is sure to sample one token, `token_ids` has a place for it, and the device
takes it from there where it was sampled.

(SGLang's overlap scheduler solves the same with a map of future tokens on the
device; vLLM's with a batch that its model runner keeps.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvrelay.engine.executor.grammar_progress import GrammarProgress
from kvrelay.model_runner.sampling.ngram import NgramIndex
from kvrelay.model_runner.sampling.step_sampling import StepSampling
from kvrelay.wire.submit import GenerationParams

UNKNOWN: Final = -1
"""In the place of a token that only the device knows."""


class PendingToken(NamedTuple):
    """What a step will add to a request's tokens that was launched and has not ended."""

    sampling: StepSampling
    """That step's."""
    row: int
    """The request's, of its ids."""
    is_sure: bool
    """One token comes; else it is not known how many, and `token_ids` has no place for them."""


@dataclass(eq=False, slots=True)
class CountedRow:
    """Where a request's tokens are counted on the device."""

    row: int
    tokens: int
    """Of its `token_ids`, those that count there, or will once what was launched has run."""


@dataclass(eq=False, slots=True, kw_only=True)
class TokenState:
    """A request's tokens as far as they are sampled, and how far their KV is written.

    Made by the engine thread and never changed by it.
    """

    token_ids: list[int]
    """Prompt and output."""
    input_len: int
    """Of `token_ids`, those whose KV comes from chunks or from a hand-over."""
    prompt_ids: Sequence[int]
    params: GenerationParams
    """All that its client has chosen for its outputs."""
    choices: Sequence[int]
    """Which outputs of the prompt are sampled here: one, or all of them from its last chunk."""
    kv_len: int = 0
    """Tokens whose KV is written and right; what a rejected draft wrote lies beyond."""
    draft_kv_len: int = 0
    """The same of the draft model's KV."""
    broken: Exception | None = None
    """Why nothing more is computed: what a failed step should have written is missing."""
    ngrams: NgramIndex | None = field(default=None, repr=False)
    """Where its n-grams are, for a drafter that looks them up."""
    pending: PendingToken | None = field(default=None, repr=False)
    """None: the host knows all tokens."""
    counted: CountedRow | None = field(default=None, repr=False)
    """The row that it was given last; another request may have it by now."""
    grammar: GrammarProgress | None = field(default=None, repr=False)
    """How far its output has come in its grammar; made anew of the tokens wherever it goes on."""

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """What was sampled, here and in earlier attempts."""
        return self.token_ids[self.prompt_len :]

    @property
    def room(self) -> int:
        """Tokens that may yet be sampled; none, when a step was launched for one too many."""
        return len(self.prompt_ids) + self.params.stops.max_tokens - len(self.token_ids)

    @property
    def in_prompt(self) -> bool:
        """Whether the tokens to compute next are still of its input."""
        return self.kv_len < self.input_len
