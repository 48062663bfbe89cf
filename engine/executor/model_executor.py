"""The execution of a step: build its batch, launch forward and sampling, read the results.

All of it runs on the forward thread. The batch is built here rather than where the step was
planned. Only now is it known which tokens the previous step has sampled.

A GPU works by itself. There a step is launched while the one before it runs::

    host      launch N            launch N+1         home of N: read N         launch N+2
    forward             [ N: forward, sampling ][ N+1: forward, sampling ]
    results                                     [N's ids to the host]

Step N+1 takes the tokens that N has sampled on the device, where they lie. A step that cannot be
launched before the host knows these tokens waits for them (`must_wait`). After drafts, for example,
their number decides where the next ones lie. A model's drafts may stay on the device until the step
that verifies them has run (`PendingDrafts`). A grammar is no reason to wait: N+1's forward is
launched, and its sampling behind N's tokens and the masks that follow from them
(`awaits_tokens`)::

    host      launch N     forward N+1      home of N: masks, sample N+1           forward N+2
    forward             [ N: forward, sampling ][ N+1: forward          , sampling ]

On a CPU a step has run when it is launched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

import torch

from kvrelay.device.device_streams import ImmediateStreams, NoStaging, StagingSet, Streams
from kvrelay.engine.executor.borrowed_threads import BorrowedThreads
from kvrelay.engine.executor.counted_rows import CountedRows, CountedStep
from kvrelay.engine.executor.grammar_masks import NO_MASKS, Allowed, GrammarMasks, PendingMasks
from kvrelay.engine.executor.pending_drafts import PendingDrafts
from kvrelay.engine.executor.step import LaunchedStep, Scheduled, Step, StepEnded, StepOutput
from kvrelay.engine.executor.step_batch import (
    AwaitedIds,
    Drafts,
    Items,
    LogitRows,
    count_work,
    find_awaited,
    make_batch,
    stage,
)
from kvrelay.engine.executor.token_rules import TokenRules, rules_of
from kvrelay.engine.executor.token_state import UNKNOWN, PendingToken, TokenState
from kvrelay.mem_cache.convert import copy_pages
from kvrelay.mem_cache.leases.publishing import PageCopy
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.errors import NonFiniteLogitsError, NothingAllowedError
from kvrelay.model_runner.sampling.prompt_scores import (
    Bring,
    DeviceScoring,
    HostScoring,
    PromptScoring,
    Score,
    ScoredChunk,
)
from kvrelay.model_runner.sampling.sampler import Sampled, SamplingRow
from kvrelay.model_runner.sampling.step_sampling import (
    DeviceSampling,
    Draw,
    HostSampling,
    StepSampling,
)
from kvrelay.model_runner.sampling.token_counts import TokenCounts
from kvrelay.model_runner.sampling.verify import DraftedSequence
from kvrelay.text.grammar import GrammarError
from kvrelay.wire.output import SampledToken
from kvrelay.wire.speeds import NO_WORK, StepWork

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
_NOTHING_LEFT: Final = "all that the request forbids, and its form, leave no token to sample"
_NO_SAMPLING: Final = HostSampling(())
"""The sampling of a step that computes nothing."""
_NO_ROWS: Final[Mapping[int, int]] = {}
_NO_SCORES: Final[Mapping[int, Sequence[SampledToken]]] = {}
_NOTHING: Final = StepOutput()
"""The output of an item that is not computed."""
Samples = Iterator[list[Sampled]]
"""The samples of each choice of a step's items, in order."""


class StepModel(Protocol):
    """The part of `ModelRunner` that a step needs."""

    def launch(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute a batch and write its KV, by work on the current stream.

        Returns:
            logits: a row for each of `logit_rows`.
        """
        ...


class Drafter(Protocol):
    """An interface for guessing the next tokens, which one forward of the model then verifies."""

    def follow(self, batch: ForwardBatch) -> None:
        """Follow the model: compute these prompt chunks, too, if the drafter has its own KV."""
        ...

    def propose(
        self,
        states: Sequence[TokenState],
        rows: Sequence[SamplingRow],
        counts: Sequence[int],
        page_tables: Sequence[Int32Array],
    ) -> Drafts:
        """Guess tokens that may follow each state, at most as many as `counts` says."""
        ...

    def begin(
        self,
        states: Sequence[TokenState],
        rows: Sequence[SamplingRow],
        counts: Sequence[int],
        page_tables: Sequence[Int32Array],
    ) -> PendingDrafts | None:
        """Begin to guess as many tokens as `counts` says, by work on the current stream.

        Returns None, with nothing done, if the host guesses, or has to know the guesses.
        """
        ...


class PageCopier:
    """A function that copies whole pages within pools, those of a draft model included."""

    def __init__(self, pools: Sequence[KVPool]) -> None:
        self._pools = pools

    def __call__(self, copies: Sequence[PageCopy]) -> None:
        """Make the copies, by work on the current stream."""
        for number, pool in enumerate(self._pools):
            sources = [copy.source for copy in copies if copy.pool == number]
            targets = [copy.target for copy in copies if copy.pool == number]
            copy_pages(pool, sources, pool, targets)


@dataclass(eq=False, slots=True)
class LaunchedForward(LaunchedStep[RequestT]):
    """A step of `ModelExecutor`.

    Work on a stream reads no token state: these have moved on before it runs.
    """

    live: Sequence[int] = ()
    """The places of the computed items in the step. The lists below have one entry for each."""
    items: Items = ()
    drafts: Drafts = ()
    pending_drafts: PendingDrafts | None = None
    """The drafts that only the device knows, which are `UNKNOWN` in `drafts` until they are read;
    None: the host knows all."""
    allowed: Mapping[int, Allowed] = field(default_factory=dict)
    """The masks that grammars allow, by the place in `items`."""
    num_tokens: int = 0
    work: StepWork = NO_WORK
    widening: float = 1.0
    """The same as `StepEnded.widening`."""
    logits: torch.Tensor | None = None
    """The logits, between the forward and the sampling."""
    rows: LogitRows = field(default_factory=LogitRows)
    staging: StagingSet = field(default_factory=NoStaging)
    are_masked: Sequence[bool] = ()
    """Whether a grammar, a budget or rules may forbid tokens of each of `items`."""
    masks: PendingMasks = NO_MASKS
    """The masks that are being computed for `allowed`."""
    masked: list[tuple[int, SamplingRow]] = field(default_factory=list)
    """The rows of items with a grammar or rules, by the place in `items`; masks come last."""
    sampling: StepSampling = _NO_SAMPLING
    counted: CountedStep | None = None
    """The tokens counted on the device; None: the host knows all that penalties depend on."""
    scoring: PromptScoring | None = None
    """The scoring of prompts' tokens, by the place in `items`; None: no item asks for it."""
    places: list[int] = field(default_factory=list)
    """The place of each item's awaited token in its `token_ids`; -1: it has none."""

    def sample(self) -> None:
        """Sample from the logits; work on the forward's stream."""
        assert self.logits is not None
        if self.scoring is not None:
            self.scoring.launch(self.logits)
        if self.counted is not None:
            self.counted.count()
        self.sampling.launch(self.rows.select_sampled(self.logits))
        self.logits = None

    def send_home(self, bring: Bring) -> None:
        """Copy the results to the host; work behind `sample`."""
        if self.scoring is not None:
            self.scoring.send_home(bring)
        if self.pending_drafts is not None:
            self.pending_drafts.send_home(bring)
        self.sampling.send_home(bring)


class ModelExecutor:
    """An `Executor` of the model, the sampler and the drafter.

    Args:
        model: runs the forwards.
        copy: copies whole pages within their pools, by work on the current stream.
        drafter: guesses tokens; None: every step yields one token a request.
        masks: computes what grammars allow; None: no request has a grammar or bans tokens.
        streams: of the model's device.
        draw: samples on the device; None: the host samples, and each step waits for its logits.
        counts: that `draw` reads; None: a step with penalties waits for the tokens before it.
        score: scores prompts on the device; None: the host does, and gets their logits.
    """

    def __init__(
        self,
        model: StepModel,
        copy: Callable[[Sequence[PageCopy]], None],
        drafter: Drafter | None = None,
        masks: GrammarMasks | None = None,
        streams: Streams | None = None,
        draw: Draw | None = None,
        counts: TokenCounts | None = None,
        score: Score | None = None,
    ) -> None:
        self._model = model
        self._copy = copy
        self._drafter = drafter
        self._masks = masks
        self._streams = streams or ImmediateStreams()
        self._staging = self._streams.make_staging()
        self._draw = draw
        self._score = score
        self._counted = None if counts is None else CountedRows(counts)
        self.borrowed_threads: BorrowedThreads | None = None
        """The choice of each step's threads; None: all steps have the same."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """See `Executor`. Raises whatever the copy raises."""
        self._streams.forward.launch(partial(self._copy, copies))

    def must_wait(self, step: Step[RequestT]) -> bool:
        """See `Executor`."""
        return any(self._needs_tokens(item) for item in step.scheduled)

    def launch(self, step: Step[RequestT]) -> LaunchedStep[RequestT]:
        """See `Executor`."""
        # A request may have ended, or failed, by the step before this one.
        live = [i for i, item in enumerate(step.scheduled) if item.is_live]
        items = [step.scheduled[i] for i in live]
        launched: LaunchedForward[RequestT] = LaunchedForward(step, live=live, items=items)
        launched.staging = self._staging.begin()
        launched.are_masked = [item.may_be_masked or item.has_token_rules for item in items]
        launched.awaits_tokens = any(
            is_masked and item.token_state.pending is not None
            for item, is_masked in zip(items, launched.are_masked, strict=True)
        )
        if live:
            self._launch_forward(launched)
        if not launched.awaits_tokens:
            self._launch_sampling(launched)
        _move_on(launched)
        return launched

    def sample(self, launched: LaunchedStep[RequestT]) -> None:
        """See `Executor`."""
        assert isinstance(launched, LaunchedForward), "another executor has launched it"
        if self._masks is not None:
            launched.masks = self._masks.begin(launched.items, launched.drafts)
        self._launch_sampling(launched)

    def finish(self, launched: LaunchedStep[RequestT]) -> StepEnded[RequestT]:
        """See `Executor`."""
        assert isinstance(launched, LaunchedForward), "another executor has launched it"
        launched.home.wait()
        step = launched.step
        outputs = [_NOTHING] * len(step.scheduled)
        for index, item in enumerate(step.scheduled):
            if item.token_state.broken is not None:
                outputs[index] = StepOutput(error=item.token_state.broken)
        if None not in [item.token_state.broken for item in launched.items]:
            # The previous step has ended all of them, as if this one had not been launched.
            return StepEnded(step, outputs)
        if launched.pending_drafts is not None:
            launched.pending_drafts.read()
        samples = iter(launched.sampling.read())
        scored = _NO_SCORES if launched.scoring is None else launched.scoring.read()
        for place, index in enumerate(launched.live):
            outputs[index] = _read(launched, place, samples, scored.get(place, ()))
        return StepEnded(
            step,
            outputs,
            num_tokens=launched.num_tokens,
            work=launched.work,
            widening=launched.widening,
        )

    def wait(self) -> None:
        """See `Executor`."""
        self._streams.forward.record().wait()
        self._streams.results.record().wait()

    def _needs_tokens(self, item: Scheduled[object]) -> bool:
        """Whether an item cannot be launched before the host knows its latest tokens."""
        pending, sampling = item.token_state.pending, item.token_state.params.sampling
        if pending is None:
            return False
        is_on_device = self._draw is not None and pending.is_sure
        if item.num_drafts > 0 or not is_on_device:
            return True
        is_counted = self._counted is not None and self._counted.has(item.token_state)
        return sampling.reads_output and not is_counted

    def _launch_forward(self, launched: LaunchedForward[RequestT]) -> None:
        """Launch the forward of its items, and prepare their sampling.

        The order matters. Grammars cut drafts before the batch is made. Masks are computed beside
        the forward, unless they depend on tokens that are not known yet.
        """
        items, forward, staging = launched.items, self._streams.forward, launched.staging
        tables = launched.step.page_tables
        if len(items) < len(launched.step.scheduled):
            tables = [table[launched.live] for table in tables]
        drafts, pending = self._propose(items, tables, launched.are_masked)
        launched.pending_drafts = pending
        if self._masks is not None and True in launched.are_masked:
            # Items with drafts await no tokens: their grammars can follow them now.
            drafts = self._masks.cut(items, self._cut_by_rules(items, drafts))
            if not launched.awaits_tokens:
                launched.masks = self._masks.begin(items, drafts)
        launched.drafts = drafts
        batch, launched.rows = make_batch(items, drafts, tables)
        launched.num_tokens, launched.work = len(batch.input_ids), count_work(items, batch)
        launched.scoring = self._make_scoring(items, launched.rows)
        awaited = None
        if not self._streams.is_immediate:
            awaited = find_awaited(items, batch, pending, staging)
            batch = stage(batch, staging)
        threads = self.borrowed_threads
        with nullcontext() if threads is None else threads.chosen(launched.work):
            forward.launch(partial(self._forward, launched, batch, awaited))
            self._follow(items, tables)
        launched.widening = 1.0 if threads is None else threads.widening
        if self._counted is not None:
            launched.counted = self._counted.begin(items, drafts, staging)
        drafted = _drafted_sequences(launched)
        draw = self._draw
        launched.sampling = DeviceSampling(draw, drafted) if draw else HostSampling(drafted)

    def _launch_sampling(self, launched: LaunchedForward[RequestT]) -> None:
        """Launch the sampling behind the forward, and the copies of the results to the host."""
        launched.allowed = self._with_rules(launched)
        for place, row in launched.masked:
            allowed = launched.allowed.get(place)
            row.allowed = None if isinstance(allowed, GrammarError) else allowed
        if launched.live:
            self._streams.forward.launch(launched.sample)
        results = self._streams.results
        results.wait_for(self._streams.forward.record())
        results.launch(partial(launched.send_home, launched.staging.bring))
        launched.home = results.record()
        launched.staging.use_until(launched.home)

    def _cut_by_rules(self, items: Items, drafts: Drafts) -> Drafts:
        """Cut drafts before the first that a client bans."""
        assert self._masks is not None
        size, cut = self._masks.vocab_size, list(drafts)
        for place, item in enumerate(items):
            if drafts[place] and item.has_token_rules:
                rules = rules_of(item.token_state, size)
                cut[place] = rules.cut(_reached(item.token_state, rules), drafts[place])
        return cut

    def _with_rules(self, launched: LaunchedForward[RequestT]) -> Mapping[int, Allowed]:
        """Wait for the masks of grammars, and put the rules of clients into them."""
        allowed = launched.masks.wait()
        if self._masks is None or not launched.masked:
            return allowed
        both = dict(allowed)
        for place, item in enumerate(launched.items):
            state, other = item.token_state, both.get(place)
            if isinstance(other, GrammarError) or state.broken is not None:
                continue
            if not item.has_token_rules:
                continue
            rules = rules_of(state, self._masks.vocab_size)
            masks = rules.masks(_reached(state, rules), launched.drafts[place])
            both[place] = masks if other is None else masks & other
        return both

    def _make_scoring(self, items: Items, rows: LogitRows) -> PromptScoring | None:
        """The scoring of the items' chunks whose clients ask for it; None: there are none."""
        chunks = {
            place: _scored_chunk(item, own)
            for place, (item, own) in enumerate(zip(items, rows.scored, strict=True))
            if own.start < own.stop
        }
        if not chunks:
            return None
        return DeviceScoring(self._score, chunks) if self._score else HostScoring(chunks)

    def _forward(
        self, launched: LaunchedForward[RequestT], batch: ForwardBatch, awaited: AwaitedIds | None
    ) -> None:
        """Compute a batch; work on the forward's stream."""
        launched.logits = self._model.launch(batch if awaited is None else awaited.put_into(batch))

    def _propose(
        self, items: Items, tables: Sequence[Int32Array], are_masked: Sequence[bool]
    ) -> tuple[Drafts, PendingDrafts | None]:
        """Draft for the items that want drafts and may generate a token behind them.

        The drafts stay on the device if the host needs none of them to launch the step.
        """
        drafts: list[Sequence[int]] = [()] * len(items)
        if self._drafter is None:
            return drafts, None
        counts = [min(item.num_drafts, item.token_state.room - 1) for item in items]
        wanted = [i for i, count in enumerate(counts) if count > 0]
        if not wanted:
            return drafts, None
        states = [items[i].token_state for i in wanted]
        rows = [_sampling_row(state, state.choices[0]) for state in states]
        own = [table[wanted] for table in tables]
        asked = (states, rows, [counts[i] for i in wanted], own)
        # Grammars and penalties read the drafts before the tokens behind them are sampled.
        are_read = any(are_masked[i] for i in wanted)
        are_read = are_read or any(row.params.reads_output for row in rows)
        pending = None
        try:
            if self._draw is not None and not are_read:
                pending = self._drafter.begin(*asked)
            proposed = self._drafter.propose(*asked) if pending is None else pending.drafts
        except Exception:  # no request's tokens depend on a guess
            logger.exception("drafting failed; the step goes on without drafts")
            return drafts, None
        for i, draft in zip(wanted, proposed, strict=True):
            drafts[i] = draft
        return drafts, pending

    def _follow(self, items: Items, tables: Sequence[Int32Array]) -> None:
        """Let the drafter compute the chunks of prompts that the model has computed."""
        if self._drafter is None:
            return
        chunks = [i for i, item in enumerate(items) if item.token_state.in_prompt]
        if not chunks:
            return
        own = [table[chunks] for table in tables]
        batch, _ = make_batch([items[i] for i in chunks], [()] * len(chunks), own)
        try:
            self._drafter.follow(batch)
        except Exception:  # its guesses get worse, but stay guesses
            logger.exception("the drafter could not follow a prompt")


def _scored_chunk(item: Scheduled[object], rows: slice) -> ScoredChunk:
    """Select the prompt tokens of an item's chunk that are to be scored."""
    state, count = item.token_state, rows.stop - rows.start
    num_top = state.params.prompt_logprobs
    assert num_top is not None
    next_ids = state.token_ids[state.kv_len + 1 : state.kv_len + 1 + count]
    return ScoredChunk(rows, next_ids, num_top)


def _drafted_sequences(launched: LaunchedForward[RequestT]) -> list[DraftedSequence]:
    """Build the sequences to sample: one for each choice of each sampled item."""
    row_of = _NO_ROWS if launched.counted is None else launched.counted.row_of
    drafted = []
    for index, (item, draft) in enumerate(zip(launched.items, launched.drafts, strict=True)):
        for choice in item.token_state.choices if item.sample else ():
            row = _sampling_row(item.token_state, choice, row_of.get(index))
            drafted.append(DraftedSequence(row, draft))
            if launched.are_masked[index]:
                launched.masked.append((index, row))
    return drafted


def _move_on(launched: LaunchedForward[RequestT]) -> None:
    """Advance the items' token states by what the step will surely write and sample."""
    is_home = not launched.awaits_tokens and launched.home.passed()
    for index, item in enumerate(launched.items):
        state, is_sure = item.token_state, not launched.drafts[index]
        state.kv_len += item.num_tokens
        place = -1
        if item.sample and len(state.choices) == 1:
            if is_sure:
                place = len(state.token_ids)
                state.token_ids.append(UNKNOWN)
            if not is_home:
                row = launched.rows.first_sampled[index]
                state.pending = PendingToken(launched.sampling, row, is_sure)
        launched.places.append(place)


def _read(
    launched: LaunchedForward[RequestT],
    index: int,
    samples: Samples,
    scores: Sequence[SampledToken],
) -> StepOutput:
    """Read the result of an item, and add its tokens to its token state."""
    item = launched.items[index]
    state = item.token_state
    sampled: list[Sampled | GrammarError] = []
    for _ in state.choices if item.sample else ():
        sampled += next(samples)
    if isinstance(error := launched.allowed.get(index), GrammarError):
        sampled = [error]
    if state.pending is not None and state.pending.sampling is launched.sampling:
        state.pending = None
    if state.broken is not None:  # by the step before, whose results were not here at the launch
        return StepOutput(error=state.broken)
    tokens = [token for token in sampled if isinstance(token, SampledToken)]
    if len(tokens) < len(sampled):
        errors = [token for token in sampled if not isinstance(token, SampledToken)]
        state.broken = _cause_of(errors[0], launched.allowed.get(index))
    _add_tokens(state, tokens, launched.places[index])
    return StepOutput(tokens, state.broken, len(launched.drafts[index]), scores)


def _reached(state: TokenState, rules: TokenRules) -> Sequence[int]:
    """The latest tokens of an output, which its rules look at."""
    return state.known_output(state.num_known_output - rules.reach)


def _cause_of(
    error: NonFiniteLogitsError | GrammarError, allowed: Allowed | None
) -> NonFiniteLogitsError | GrammarError:
    """The error of an item, which is the request's own if its masks have left no token."""
    if isinstance(error, NothingAllowedError) and allowed is not None:
        return GrammarError(_NOTHING_LEFT)
    return error


def _add_tokens(state: TokenState, tokens: Sequence[SampledToken], place: int) -> None:
    """Add sampled tokens to a token state: at their reserved place, or else at the end."""
    if place >= 0:
        if tokens:
            state.token_ids[place] = tokens[0].token_id
    elif len(state.choices) == 1:
        state.kv_len += max(len(tokens) - 1, 0)
        state.token_ids += [token.token_id for token in tokens]


def _sampling_row(state: TokenState, choice: int, counted_row: int | None = None) -> SamplingRow:
    """Build the sampling parameters of the token that follows a state, for one choice."""
    position, sampling, stops = len(state.token_ids), state.params.sampling, state.params.stops
    least = stops.min_tokens
    needs_outputs = sampling.edits_logits and counted_row is None
    return SamplingRow(
        params=sampling,
        position=position,
        prompt_ids=state.prompt_ids,
        output_ids=state.output_ids if needs_outputs else (),
        banned_ids=tuple(stops.stop_token_ids) if least else (),
        banned_for=max(0, least - (position - state.prompt_len)) if least else 0,
        choice=choice,
        counted_row=counted_row,
    )
