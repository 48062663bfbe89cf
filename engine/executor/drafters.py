"""The drafters of `model_executor.Drafter`: they guess next tokens, on the forward thread."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.executor.pending_drafts import PendingDrafts
from kvrelay.engine.executor.token_state import TokenState
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.draft_model import DraftModel, DraftRequest
from kvrelay.model_runner.sampling.ngram import NgramIndex
from kvrelay.model_runner.sampling.sampler import SamplingRow


class NgramDrafter:
    """A drafter that guesses that a request repeats its prompt or its output."""

    def follow(self, batch: ForwardBatch) -> None:
        """Do nothing: a prompt is indexed when its first guess is made."""

    def propose(
        self,
        states: Sequence[TokenState],
        rows: Sequence[SamplingRow],
        counts: Sequence[int],
        page_tables: Sequence[Int32Array],
    ) -> list[Sequence[int]]:
        """Look up what followed the latest tokens when they came before."""
        return [
            _index_of(state).propose(count) for state, count in zip(states, counts, strict=True)
        ]

    def begin(
        self,
        states: Sequence[TokenState],
        rows: Sequence[SamplingRow],
        counts: Sequence[int],
        page_tables: Sequence[Int32Array],
    ) -> None:
        """Return None: the host guesses."""


def _index_of(state: TokenState) -> NgramIndex:
    """The index of all tokens that a state has by now."""
    if state.ngrams is None:
        state.ngrams = NgramIndex()
    state.ngrams.extend(state.token_ids[len(state.ngrams) :])
    return state.ngrams


class ModelDrafter:
    """A drafter that lets a smaller model guess.

    Its KV lies in pools of its own behind the same leases.

    Args:
        model: bound to its pools.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def follow(self, batch: ForwardBatch) -> None:
        """Compute the same chunks of prompts with the draft model."""
        self._model.follow(batch)

    def propose(
        self,
        states: Sequence[TokenState],
        rows: Sequence[SamplingRow],
        counts: Sequence[int],
        page_tables: Sequence[Int32Array],
    ) -> list[Sequence[int]]:
        """Compute the known tokens that the draft model lacks, then generate guesses."""
        proposals = self._model.propose(_requests(states, rows, counts), page_tables)
        for state, proposal in zip(states, proposals, strict=True):
            state.draft_kv_len = proposal.kv_len
        return [proposal.token_ids for proposal in proposals]

    def begin(
        self,
        states: Sequence[TokenState],
        rows: Sequence[SamplingRow],
        counts: Sequence[int],
        page_tables: Sequence[Int32Array],
    ) -> PendingDrafts | None:
        """Launch the same; None if the host must know each guess before the next."""
        requests = _requests(states, rows, counts)
        pending = self._model.begin(requests, page_tables)
        if pending is None:
            return None
        for state, request in zip(states, requests, strict=True):
            state.draft_kv_len = request.kv_end
        return PendingDrafts(pending.ids, pending.places)


def _requests(
    states: Sequence[TokenState], rows: Sequence[SamplingRow], counts: Sequence[int]
) -> list[DraftRequest]:
    """List what to guess, each with the tokens whose draft KV is missing, or a rejected guess's."""
    requests = []
    for state, row, count in zip(states, rows, counts, strict=True):
        kv_len = min(state.draft_kv_len, len(state.token_ids) - 1)
        requests.append(DraftRequest(row, state.token_ids[kv_len:], count))
    return requests
