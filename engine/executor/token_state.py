"""A request's tokens on the forward thread, the only writer once a step was launched.

A step that is planned before the previous one has ended does not know its own input. The token that
it begins with is not sampled yet. After a verification of drafts not even the number of tokens is
known. So a step says only *whose* next tokens it computes. Which tokens they are, and where they
go, is read from the `TokenState` when the forward begins.

On a GPU even that may be too early: the previous step has been launched and has not run. If it is
sure to sample one token, `token_ids` has a place for it, and the device reads it where it was
sampled.

(SGLang's overlap scheduler solves the same with a map of future tokens on the device; vLLM's with a
batch that its model runner keeps.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from kvrelay.engine.executor.grammar_progress import GrammarProgress
from kvrelay.model_runner.sampling.ngram import NgramIndex
from kvrelay.model_runner.sampling.step_sampling import StepSampling
from kvrelay.text.reasoning_progress import ReasoningProgress
from kvrelay.wire.submit import GenerationParams

if TYPE_CHECKING:
    from kvrelay.engine.executor.token_rules import TokenRules

UNKNOWN: Final = -1
"""The placeholder for a token that only the device knows."""


class PendingToken(NamedTuple):
    """The tokens that a launched step will add to a request."""

    sampling: StepSampling
    """The sampling of that step."""
    row: int
    """The request's row in the sampled ids."""
    is_sure: bool
    """Whether exactly one token comes; else the number is unknown, and `token_ids` has no place."""


@dataclass(eq=False, slots=True)
class CountedRow:
    """The row in which a request's tokens are counted on the device."""

    row: int
    tokens: int
    """How many of its `token_ids` are counted there, or will be once the launched work has run."""


@dataclass(eq=False, slots=True, kw_only=True)
class TokenState:
    """A request's tokens as far as they are sampled, and how far their KV is written.

    The engine thread creates it and never changes it.
    """

    token_ids: list[int]
    """Tokens of prompt and output."""
    input_len: int
    """How many of `token_ids` get their KV from prompt chunks or from a hand-over."""
    prompt_ids: Sequence[int]
    params: GenerationParams
    """The parameters that its client has chosen."""
    choices: Sequence[int]
    """The outputs of the prompt that are sampled here: one, or all of them from its last chunk."""
    kv_len: int = 0
    """Tokens whose KV is written and right; rejected drafts wrote beyond it."""
    draft_kv_len: int = 0
    """The same of the draft model's KV."""
    broken: Exception | None = None
    """The reason why nothing more is computed: a failed step has not written its KV."""
    ngrams: NgramIndex | None = field(default=None, repr=False)
    """The index of its n-grams, for a drafter that looks them up."""
    pending: PendingToken | None = field(default=None, repr=False)
    """The token that is still on the device; None: the host knows all tokens."""
    counted: CountedRow | None = field(default=None, repr=False)
    """The row that it was given last; another request may have it by now."""
    grammar: GrammarProgress | None = field(default=None, repr=False)
    """The position of its output in its grammar; rebuilt from the tokens wherever the request goes
    on."""
    thinking: ReasoningProgress | None = field(default=None, repr=False)
    """The position of its output in its reasoning, rebuilt alike; None: it has none, or none that
    matters for masks."""
    rules: TokenRules | None = field(default=None, repr=False)
    """The tokens that its client allows and bans, once they are asked for."""

    @property
    def prompt_len(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The tokens sampled so far, here and in earlier attempts."""
        return self.token_ids[self.prompt_len :]

    @property
    def known_output_ids(self) -> list[int]:
        """The same without the token that only the device knows."""
        return self.known_output(0)

    @property
    def num_known_output(self) -> int:
        """The number of `known_output_ids`."""
        has_place = self.pending is not None and self.pending.is_sure
        return len(self.token_ids) - has_place - self.prompt_len

    def known_output(self, begin: int) -> list[int]:
        """Return `known_output_ids` from an index on, without a copy of those before."""
        end = self.prompt_len + self.num_known_output
        return self.token_ids[self.prompt_len + max(begin, 0) : end]

    @property
    def room(self) -> int:
        """How many more tokens may be sampled; below 1 if a step was launched for one too many."""
        return len(self.prompt_ids) + self.params.stops.max_tokens - len(self.token_ids)

    def may_be_masked(self, num_drafts: int) -> bool:
        """Whether a grammar, or a budget, may forbid tokens: the next, or those after drafts."""
        sampling = self.params.sampling
        if sampling.structured_output is not None:
            return True
        budget = sampling.thinking_token_budget
        if budget is None:
            return False
        if self.thinking is not None and self.thinking.has_ended:
            return False
        return len(self.token_ids) - self.prompt_len + num_drafts >= budget

    @property
    def in_prompt(self) -> bool:
        """Whether the tokens to compute next still belong to its input."""
        return self.kv_len < self.input_len
