"""Executes a step: builds its batch, runs the forward, samples, and moves the token states on.

All of it runs on the forward thread. The batch is built here and not where the step
was planned, because only now is it known which tokens the step before has sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch

from kvrelay.engine.executor.grammar_masks import NO_MASKS, Allowed, GrammarMasks
from kvrelay.engine.executor.step import Scheduled, Step, StepEnded, StepOutput
from kvrelay.engine.executor.token_state import TokenState
from kvrelay.mem_cache.convert import copy_pages
from kvrelay.mem_cache.pool import KVPool
from kvrelay.mem_cache.sharing import PageCopy
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.sampling.prompt_scores import score_prompt
from kvrelay.model_runner.sampling.sampler import Sampled, SamplingRow
from kvrelay.model_runner.sampling.verify import DraftedSequence, verify
from kvrelay.model_runner.torch_options import wait_for_device
from kvrelay.text.grammar import GrammarError
from kvrelay.wire.output import SampledToken
from kvrelay.wire.speeds import StepWork

logger = logging.getLogger(__name__)

Drafts = Sequence[Sequence[int]]
"""Drafted tokens of each item of a step; empty for those without any."""
Items = Sequence[Scheduled[object]]
"""Those of a step that are computed."""
RequestT = TypeVar("RequestT")


class Model(Protocol):
    """The part of `ModelRunner` that a step needs."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute a batch, write its KV, and return logits: a row for each of `logit_rows`."""
        ...


class Drafter(Protocol):
    """Guesses what comes next, for one forward of the model to verify."""

    def follow(self, batch: ForwardBatch) -> None:
        """The model has computed these chunks of prompts: whatever keeps KV of its own does too."""
        ...

    def propose(
        self,
        states: Sequence[TokenState],
        rows: Sequence[SamplingRow],
        counts: Sequence[int],
        page_tables: Sequence[Int32Array],
    ) -> Drafts:
        """Tokens that may follow each state, at most as many as `counts` says."""
        ...


class PageCopier:
    """Copies whole pages within pools, those of a draft model included."""

    def __init__(self, pools: Sequence[KVPool]) -> None:
        self._pools = pools

    def __call__(self, copies: Sequence[PageCopy]) -> None:
        """Make the copies; they are there on return, for peers and for forwards that follow."""
        for number, pool in enumerate(self._pools):
            sources = [copy.source for copy in copies if copy.pool == number]
            targets = [copy.target for copy in copies if copy.pool == number]
            copy_pages(pool, sources, pool, targets)
        # A step without a forward would end before its copies: nothing else waits for them.
        for device in {pool.data.device for pool in self._pools}:
            wait_for_device(device)


class LogitRows:
    """Which rows of a step's logits belong to which item.

    The rows of one item follow each other, in the order of the items::

        scored                   | sampled
        one for each token whose | one for each choice, all of | one for each
        follower is scored       | the last known token        | draft

    `make_batch` asks the model for these rows, `read_logits` reads them.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """For each row, the place of its token in the batch."""
        self.scored: list[slice] = []
        """For each item, its rows of prompt tokens; may be empty."""
        self.sampled: list[int] = []
        """The rows of all items that are sampled from, or that drafts are verified with."""

    def add(self, item: Scheduled[object], draft: Sequence[int], begin: int) -> None:
        """Add the rows of the next item, whose tokens begin at place `begin` in the batch."""
        first = len(self.tokens)
        num_scored = _num_scored(item)
        self.tokens += range(begin, begin + num_scored)
        self.scored.append(slice(first, first + num_scored))
        if item.sample:
            last = begin + item.num_tokens - 1
            self.tokens += [last] * len(item.token_state.choices)
            self.tokens += range(last + 1, last + 1 + len(draft))
            self.sampled += range(first + num_scored, len(self.tokens))


class ModelExecutor:
    """Executes steps with the model, the sampler and the drafter; an `Executor`.

    Args:
        model: runs the forwards.
        copy: copies whole pages within their pools.
        drafter: None: every step yields one token a request.
        masks: of what grammars allow; None: no request has a grammar.
    """

    def __init__(
        self,
        model: Model,
        copy: Callable[[Sequence[PageCopy]], None],
        drafter: Drafter | None = None,
        masks: GrammarMasks | None = None,
    ) -> None:
        self._model = model
        self._copy = copy
        self._drafter = drafter
        self._masks = masks

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages, for the forwards that follow. Raises whatever the copy raises."""
        self._copy(copies)

    def execute(self, step: Step[RequestT]) -> StepEnded[RequestT]:
        """Compute one step. An error that concerns one request alone is in its `StepOutput`."""
        # A request may have ended, or failed, by the step before this one.
        live = [i for i, item in enumerate(step.scheduled) if item.is_live]
        outputs = [StepOutput(error=item.token_state.broken) for item in step.scheduled]
        if not live:
            return StepEnded(step, outputs)
        items = [step.scheduled[i] for i in live]
        tables = [table[live] for table in step.page_tables]
        drafts = self._propose(items, tables)
        masks = NO_MASKS
        if self._masks is not None:
            drafts, masks = self._masks.begin(items, drafts)
        batch, rows = make_batch(items, drafts, tables)
        work = count_work(items, batch)
        logits = self._model.forward(batch)
        self._follow(items, tables)
        read = read_logits(logits, rows, items, drafts, masks.wait())
        for i, output in zip(live, read, strict=True):
            outputs[i] = output
        return StepEnded(step, outputs, num_tokens=len(batch.input_ids), work=work)

    def _propose(self, items: Items, tables: Sequence[Int32Array]) -> Drafts:
        """Draft for the items that want drafts and may generate a token behind them."""
        drafts: list[Sequence[int]] = [()] * len(items)
        if self._drafter is None:
            return drafts
        counts = [min(item.num_drafts, item.token_state.room - 1) for item in items]
        wanted = [i for i, count in enumerate(counts) if count > 0]
        if not wanted:
            return drafts
        states = [items[i].token_state for i in wanted]
        rows = [_sampling_row(state, state.choices[0]) for state in states]
        own = [table[wanted] for table in tables]
        try:
            proposed = self._drafter.propose(states, rows, [counts[i] for i in wanted], own)
        except Exception:  # no request's tokens depend on a guess
            logger.exception("drafting failed; the step goes on without drafts")
            return drafts
        for i, draft in zip(wanted, proposed, strict=True):
            drafts[i] = draft
        return drafts

    def _follow(self, items: Items, tables: Sequence[Int32Array]) -> None:
        """Let the drafter compute the chunks of prompts that the model has computed."""
        chunks = [i for i, item in enumerate(items) if item.token_state.in_prompt]
        if self._drafter is None or not chunks:
            return
        own = [table[chunks] for table in tables]
        batch, _ = make_batch([items[i] for i in chunks], [()] * len(chunks), own)
        try:
            self._drafter.follow(batch)
        except Exception:  # its guesses get worse, but stay guesses
            logger.exception("the drafter could not follow a prompt")


def make_batch(
    items: Items, drafts: Drafts, page_tables: Sequence[Int32Array]
) -> tuple[ForwardBatch, LogitRows]:
    """Lay the items' next tokens end to end, each item's drafts behind its own tokens.

    Returns:
        The batch, and which of the rows of logits that it asks for belong to which item.
    """
    input_ids: list[int] = []
    lengths: list[int] = []
    ends: list[int] = []
    rows = LogitRows()
    for item, draft in zip(items, drafts, strict=True):
        state, begin = item.token_state, len(input_ids)
        input_ids += state.token_ids[state.kv_len : state.kv_len + item.num_tokens]
        input_ids += draft
        rows.add(item, draft, begin)
        lengths.append(len(input_ids) - begin)
        ends.append(state.kv_len + len(input_ids) - begin)
    counts, seq_lens = np.array(lengths), np.array(ends)
    query_start = np.concatenate(([0], np.cumsum(counts)))
    # Every token's place in its own query, plus where that begins in its sequence.
    positions = np.arange(query_start[-1]) + np.repeat(seq_lens - query_start[1:], counts)
    batch = ForwardBatch(
        input_ids=np.array(input_ids, np.int64),
        positions=positions.astype(np.int64),
        query_start=query_start.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        page_tables=tuple(page_tables),
        logit_rows=np.array(rows.tokens, np.int64),
    )
    return batch, rows


def count_work(items: Items, batch: ForwardBatch) -> StepWork:
    """What a batch computes, before its tokens move the items' token states on."""
    in_prompt = np.array([item.token_state.in_prompt for item in items])
    ends = batch.seq_lens.astype(np.int64)
    if not in_prompt.any():
        return StepWork(rows=len(items), row_pairs=int(ends.sum()))
    counts = np.diff(batch.query_start)[in_prompt]
    # Each token attends to those before it and to itself.
    pairs = counts * (2 * ends[in_prompt] - counts + 1) // 2
    rows = ends[~in_prompt]
    return StepWork(int(counts.sum()), int(pairs.sum()), len(rows), int(rows.sum()))


def _num_scored(item: Scheduled[object]) -> int:
    """Tokens of a chunk, from its first on, whose followers in the prompt are scored."""
    state = item.token_state
    if state.prompt_logprobs is None or not state.in_prompt:
        return 0
    return max(0, min(item.num_tokens, state.prompt_len - 1 - state.kv_len))


def read_logits(
    logits: torch.Tensor,
    rows: LogitRows,
    items: Items,
    drafts: Drafts,
    allowed: Mapping[int, Allowed] = NO_MASKS.none,
) -> list[StepOutput]:
    """Score, sample and verify from a step's logits; moves the items' token states on.

    `allowed` says what grammars allow, by the items' indices.
    """
    scores = [_score(logits, own, item) for own, item in zip(rows.scored, items, strict=True)]
    drafted = [
        DraftedSequence(_sampling_row(item.token_state, choice, allowed.get(index)), draft)
        for index, (item, draft) in enumerate(zip(items, drafts, strict=True))
        if item.sample
        for choice in item.token_state.choices
    ]
    # Selecting rows copies them, so not when every row is sampled from.
    all_sampled = len(rows.sampled) == len(rows.tokens)
    verified = iter(verify(logits if all_sampled else logits[rows.sampled], drafted))
    outputs = []
    for index, (item, draft, prompt_logprobs) in enumerate(zip(items, drafts, scores, strict=True)):
        choices = item.token_state.choices if item.sample else ()
        sampled: list[Sampled | GrammarError] = [t for _ in choices for t in next(verified)]
        if isinstance(error := allowed.get(index), GrammarError):
            sampled = [error]
        outputs.append(_advance(item, draft, sampled, prompt_logprobs))
    return outputs


def _score(logits: torch.Tensor, own: slice, item: Scheduled[object]) -> Sequence[SampledToken]:
    """The log-probabilities of the prompt tokens that follow those of rows `own`, if asked for."""
    state, count = item.token_state, own.stop - own.start
    if not count:
        return ()
    assert state.prompt_logprobs is not None
    following = state.token_ids[state.kv_len + 1 : state.kv_len + 1 + count]
    return score_prompt(logits[own], following, state.prompt_logprobs)


def _advance(
    item: Scheduled[object],
    draft: Sequence[int],
    sampled: Sequence[Sampled | GrammarError],
    prompt_logprobs: Sequence[SampledToken],
) -> StepOutput:
    """Add what was computed and sampled to an item's token state."""
    state = item.token_state
    tokens = [token for token in sampled if isinstance(token, SampledToken)]
    errors = [token for token in sampled if not isinstance(token, SampledToken)]
    state.kv_len += item.num_tokens
    if len(state.choices) == 1:
        state.kv_len += max(len(tokens) - 1, 0)
        state.token_ids += [token.token_id for token in tokens]
    state.broken = errors[0] if errors else None
    return StepOutput(tokens, state.broken, len(draft), prompt_logprobs)


def _sampling_row(state: TokenState, choice: int, allowed: Allowed | None = None) -> SamplingRow:
    """How the token that follows a state is sampled, for one choice."""
    num_output = len(state.token_ids) - state.prompt_len
    outputs = state.output_ids if state.sampling.edits_logits else ()
    return SamplingRow(
        params=state.sampling,
        position=len(state.token_ids),
        prompt_ids=state.prompt_ids,
        output_ids=outputs,
        banned_ids=tuple(state.stops.stop_token_ids) if state.stops.min_tokens else (),
        banned_for=max(0, state.stops.min_tokens - num_output),
        choice=choice,
        allowed=None if isinstance(allowed, GrammarError) else allowed,
    )
