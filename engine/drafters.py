"""Who guesses the next tokens of a request. On the forward thread; see `computer.Drafter`."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.tape import Tape
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.draft_model import Drafting, DraftModel
from kvrelay.model_runner.ngram import NgramIndex
from kvrelay.model_runner.sampler import SamplingRow


class NgramDrafter:
    """Guesses that a request repeats what it has said, or was told, before."""

    def follow(self, batch: ForwardBatch) -> None:
        """See `Drafter`: prompts are read when their first guess is made."""

    def propose(
        self,
        tapes: Sequence[Tape],
        rows: Sequence[SamplingRow],
        counts: Sequence[int],
        page_tables: Sequence[Int32Array],
    ) -> list[Sequence[int]]:
        """See `Drafter`."""
        return [_index_of(tape).propose(count) for tape, count in zip(tapes, counts, strict=True)]


def _index_of(tape: Tape) -> NgramIndex:
    """The index of all tokens that a tape has by now."""
    if tape.ngrams is None:
        tape.ngrams = NgramIndex()
    tape.ngrams.extend(tape.token_ids[len(tape.ngrams) :])
    return tape.ngrams


class ModelDrafter:
    """Lets a smaller model guess, whose KV lies in pools of its own behind the same leases.

    Args:
        model: bound to its pools.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def follow(self, batch: ForwardBatch) -> None:
        """See `Drafter`."""
        self._model.forward(batch)

    def propose(
        self,
        tapes: Sequence[Tape],
        rows: Sequence[SamplingRow],
        counts: Sequence[int],
        page_tables: Sequence[Int32Array],
    ) -> list[Sequence[int]]:
        """See `Drafter`."""
        drafting = []
        for tape, row, count in zip(tapes, rows, counts, strict=True):
            # What it wrote for guesses that were not kept is written again.
            kv_len = min(tape.draft_kv_len, len(tape.token_ids) - 1)
            drafting.append(Drafting(row, tape.token_ids[kv_len:], count))
        proposals = self._model.propose(drafting, page_tables)
        for tape, proposal in zip(tapes, proposals, strict=True):
            tape.draft_kv_len = proposal.kv_len
        return [proposal.token_ids for proposal in proposals]
