"""Computes a step: its input from the tapes, the forward, the tokens, back to the tapes.

On the forward thread. A step's input is made here, not where it was planned:
only now is it known which tokens the step before has sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from kvrelay.engine.step import Computed, Scheduled, Step, StepEnded
from kvrelay.engine.tape import Tape
from kvrelay.mem_cache.convert import copy_pages
from kvrelay.mem_cache.pool import KVPool
from kvrelay.mem_cache.sharing import PageCopy
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.errors import NonFiniteLogitsError
from kvrelay.model_runner.prompt_scores import score_prompt
from kvrelay.model_runner.sampler import Sampled, SampledToken, SamplingRow
from kvrelay.model_runner.verify import Drafted, verify

logger = logging.getLogger(__name__)

Drafts = Sequence[Sequence[int]]


class Model(Protocol):
    """The part of `ModelRunner` that a step needs."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See `ModelRunner.forward`."""
        ...


class Drafter(Protocol):
    """Guesses what comes next, for one forward of the model to verify."""

    def follow(self, batch: ForwardBatch) -> None:
        """The model has computed these chunks of prompts: whatever keeps KV of its own does too."""
        ...

    def propose(
        self,
        tapes: Sequence[Tape],
        rows: Sequence[SamplingRow],
        counts: Sequence[int],
        page_tables: Sequence[Int32Array],
    ) -> Drafts:
        """Tokens that may follow each tape, at most as many as `counts` says."""
        ...


class PageCopier:
    """Copies whole pages within pools, those of a draft model included."""

    def __init__(self, pools: Sequence[KVPool]) -> None:
        self._pools = pools

    def __call__(self, copies: Sequence[PageCopy]) -> None:
        """Make the copies, for the forwards that follow."""
        for number, pool in enumerate(self._pools):
            sources = [copy.source for copy in copies if copy.pool == number]
            targets = [copy.target for copy in copies if copy.pool == number]
            copy_pages(pool, sources, pool, targets)


class StepComputer:
    """The model, the sampler and the drafter, as `engine.step.Computer`.

    Args:
        model: runs the forwards.
        copy: copies whole pages within their pools.
        drafter: None: every step yields one token a request.
    """

    def __init__(
        self,
        model: Model,
        copy: Callable[[Sequence[PageCopy]], None],
        drafter: Drafter | None = None,
    ) -> None:
        self._model = model
        self._copy = copy
        self._drafter = drafter

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """See `Computer`."""
        self._copy(copies)

    def compute(self, step: Step) -> StepEnded:
        """See `Computer`."""
        # A request may have ended, or failed, by the step before this one.
        live = [i for i, item in enumerate(step.scheduled) if _is_live(item)]
        computed = [Computed(error=item.tape.broken) for item in step.scheduled]
        if not live:
            return StepEnded(step, computed)
        items = [step.scheduled[i] for i in live]
        tables = [table[live] for table in step.page_tables]
        drafts = self._propose(items, tables)
        batch = make_batch(items, drafts, tables)
        logits = self._model.forward(batch)
        self._follow(items, tables)
        for i, result in zip(live, _read(logits, items, drafts), strict=True):
            computed[i] = result
        return StepEnded(step, computed, num_tokens=len(batch.input_ids))

    def _propose(self, items: Sequence[Scheduled], tables: Sequence[Int32Array]) -> Drafts:
        """Drafts for those who want them, and have room for output behind them."""
        drafts: list[Sequence[int]] = [()] * len(items)
        if self._drafter is None:
            return drafts
        counts = [min(item.num_drafts, item.tape.room - 1) for item in items]
        wanted = [i for i, count in enumerate(counts) if count > 0]
        if not wanted:
            return drafts
        tapes = [items[i].tape for i in wanted]
        rows = [_sampling_row(tape, tape.choices[0]) for tape in tapes]
        own = [table[wanted] for table in tables]
        try:
            proposed = self._drafter.propose(tapes, rows, [counts[i] for i in wanted], own)
        except Exception:  # a worse guess than none: but nobody's tokens depend on it
            logger.exception("drafting failed; the step goes on without")
            return drafts
        for i, draft in zip(wanted, proposed, strict=True):
            drafts[i] = draft
        return drafts

    def _follow(self, items: Sequence[Scheduled], tables: Sequence[Int32Array]) -> None:
        chunks = [i for i, item in enumerate(items) if item.tape.in_prompt]
        if self._drafter is None or not chunks:
            return
        own = [table[chunks] for table in tables]
        batch = make_batch([items[i] for i in chunks], [()] * len(chunks), own)
        try:
            self._drafter.follow(batch)
        except Exception:  # its guesses will be worse
            logger.exception("the drafter could not follow a prompt")


def _is_live(item: Scheduled) -> bool:
    return item.tape.broken is None and not (item.sample and item.tape.room == 0)


def make_batch(
    items: Sequence[Scheduled], drafts: Drafts, page_tables: Sequence[Int32Array]
) -> ForwardBatch:
    """Lay the items' next tokens end to end, each one's drafts behind them.

    Logits are wanted of the positions whose followers are scored, then of the
    last known token, once for each choice, then of the drafts.
    """
    input_ids: list[int] = []
    lengths: list[int] = []
    ends: list[int] = []
    logit_rows: list[int] = []
    for item, draft in zip(items, drafts, strict=True):
        tape, begin = item.tape, len(input_ids)
        input_ids += tape.token_ids[tape.kv_len : tape.kv_len + item.num_tokens]
        logit_rows += range(begin, begin + _num_scored(item))
        last = len(input_ids) - 1
        input_ids += draft
        if item.sample:
            logit_rows += [last] * len(tape.choices)
            logit_rows += range(last + 1, len(input_ids))
        lengths.append(len(input_ids) - begin)
        ends.append(tape.kv_len + len(input_ids) - begin)
    counts, seq_lens = np.array(lengths), np.array(ends)
    query_start = np.concatenate(([0], np.cumsum(counts)))
    # Every token's place in its own query, plus where that begins in its sequence.
    positions = np.arange(query_start[-1]) + np.repeat(seq_lens - query_start[1:], counts)
    return ForwardBatch(
        input_ids=np.array(input_ids, np.int64),
        positions=positions.astype(np.int64),
        query_start=query_start.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        page_tables=tuple(page_tables),
        logit_rows=np.array(logit_rows, np.int64),
    )


def _num_scored(item: Scheduled) -> int:
    """Tokens of a chunk, from its first on, whose followers in the prompt are to be reported."""
    tape = item.tape
    if tape.prompt_logprobs is None or not tape.in_prompt:
        return 0
    return min(item.num_tokens, tape.prompt_len - 1 - tape.kv_len)


def _read(logits: torch.Tensor, items: Sequence[Scheduled], drafts: Drafts) -> list[Computed]:
    """What the logits of `make_batch` say of each item; moves the tapes on."""
    drafted: list[Drafted] = []
    scored: list[Sequence[SampledToken]] = []
    sampled: list[int] = []
    at = 0
    for item, draft in zip(items, drafts, strict=True):
        scored.append(_score(logits, at, item))
        at += len(scored[-1])
        if item.sample:
            rows = [_sampling_row(item.tape, choice) for choice in item.tape.choices]
            drafted += [Drafted(row, draft) for row in rows]
            count = len(rows) + len(draft)
            sampled += range(at, at + count)
            at += count
    verified = iter(verify(logits if len(sampled) == at else logits[sampled], drafted))
    computed = []
    for item, draft, prompt_logprobs in zip(items, drafts, scored, strict=True):
        choices = item.tape.choices if item.sample else ()
        taken = [token for _ in choices for token in next(verified)]
        computed.append(_settle(item, draft, taken, prompt_logprobs))
    return computed


def _score(logits: torch.Tensor, at: int, item: Scheduled) -> Sequence[SampledToken]:
    tape, count = item.tape, _num_scored(item)
    if count <= 0:
        return ()
    assert tape.prompt_logprobs is not None
    following = tape.token_ids[tape.kv_len + 1 : tape.kv_len + 1 + count]
    return score_prompt(logits[at : at + count], following, tape.prompt_logprobs)


def _settle(
    item: Scheduled,
    draft: Sequence[int],
    sampled: Sequence[Sampled],
    prompt_logprobs: Sequence[SampledToken],
) -> Computed:
    """Move a tape on by what was computed, and say so."""
    tape = item.tape
    tokens = [token for token in sampled if not isinstance(token, NonFiniteLogitsError)]
    errors = [token for token in sampled if isinstance(token, NonFiniteLogitsError)]
    tape.kv_len += item.num_tokens
    if len(tape.choices) == 1:
        tape.kv_len += max(len(tokens) - 1, 0)
        tape.token_ids += [token.token_id for token in tokens]
    tape.broken = errors[0] if errors else None
    return Computed(tokens, tape.broken, len(draft), prompt_logprobs)


def _sampling_row(tape: Tape, choice: int) -> SamplingRow:
    """How the token after a tape is chosen."""
    num_output = len(tape.token_ids) - tape.prompt_len
    outputs = tape.token_ids[tape.prompt_len :] if tape.sampling.edits_logits else ()
    return SamplingRow(
        params=tape.sampling,
        position=len(tape.token_ids),
        prompt_ids=tape.prompt_ids,
        output_ids=outputs,
        banned_ids=tuple(tape.stops.stop_token_ids) if tape.stops.min_tokens else (),
        banned_for=max(0, tape.stops.min_tokens - num_output),
        choice=choice,
    )
