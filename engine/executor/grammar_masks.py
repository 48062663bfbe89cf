"""Masks of the tokens that grammars allow next, computed on their own thread beside a forward.

How far an output has come in its grammar is read from its tokens alone. So a request hands nothing
over when it goes on elsewhere: on its decode worker, after a retraction or after a lost worker.

A grammar holds from the end of the output's reasoning on. Before that, only tokens that would end
the reasoning and say more at once are forbidden. Where its budget is spent, the next token of its
end is forced.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar, TypeAlias

from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import (
    allocate_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from kvrelay.engine.executor.grammar_progress import GrammarProgress
from kvrelay.engine.executor.reasoning_masks import ReasoningMasks, allow
from kvrelay.engine.executor.step import Scheduled
from kvrelay.engine.executor.token_state import TokenState
from kvrelay.model_runner.sampling.sampler import TokenMasks
from kvrelay.text.grammar import CompiledGrammar, GrammarError, Grammars, words_of
from kvrelay.text.reasoning_progress import ReasoningPhase, ReasoningProgress
from kvrelay.wire.submit import StructuredOutput

Allowed: TypeAlias = TokenMasks | GrammarError
"""Masks of an item's next token and of the one after each draft, or why there are none."""
Wanted: TypeAlias = tuple[int, TokenState, Sequence[int]]
"""An item's index in its step, and what its masks depend on: its tokens and its drafts."""


class PendingMasks:
    """The masks of one step.

    Args:
        future: the masks, by the items' indices; None: no item has a grammar.
    """

    none: ClassVar[Mapping[int, Allowed]] = {}

    def __init__(self, future: Future[Mapping[int, Allowed]] | None = None) -> None:
        self._future = future

    def wait(self) -> Mapping[int, Allowed]:
        """Wait for the masks and return them."""
        return self.none if self._future is None else self._future.result()


NO_MASKS = PendingMasks()


class GrammarMasks:
    """The masks of each step, computed while its forward runs. Call it on the forward thread.

    Args:
        grammars: compiles them, and has those of all requests.
        vocab_size: bits of a mask.
    """

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars = grammars
        self.vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._filler: LLExecutor | None = None
        self._reasoning: ReasoningMasks | None = None

    def cut(
        self, items: Sequence[Scheduled[object]], drafts: Sequence[Sequence[int]]
    ) -> Sequence[Sequence[int]]:
        """Cut the drafts of a step's items before the first token that is forbidden.

        The host must know all tokens of an item that has drafts and may be masked.
        """
        return [
            self._cut(item.token_state, draft) if draft and item.may_be_masked else draft
            for item, draft in zip(items, drafts, strict=True)
        ]

    def begin(
        self, items: Sequence[Scheduled[object]], drafts: Sequence[Sequence[int]]
    ) -> PendingMasks:
        """Begin to compute the masks of a step's items, behind drafts that `cut` has returned.

        The items' token states must not change until the masks are there. There are none for items
        that a step before has broken.
        """
        wanted = [
            (i, item.token_state, drafts[i])
            for i, item in enumerate(items)
            if item.may_be_masked and item.token_state.broken is None
        ]
        if not wanted:
            return NO_MASKS
        return PendingMasks(self._thread.submit(self._compute, wanted))

    def _cut(self, state: TokenState, draft_ids: Sequence[int]) -> Sequence[int]:
        thinking, has_form = self._thinking(state), _has_form(state)
        if thinking is None:
            return self._cut_by_form(state, draft_ids)
        now, reasoning = thinking.copy(), self._reasoning_masks
        for count, token_id in enumerate(draft_ids):
            if now.has_ended and has_form:
                if token_id in reasoning.gaps(now):  # the grammar would not see it
                    return draft_ids[:count]
                return [*draft_ids[:count], *self._cut_by_form(state, draft_ids[count:])]
            if has_form and reasoning.may_end_otherwise(now, state.params, token_id):
                return draft_ids[:count]
            if reasoning.forced(now, state.params) not in (None, token_id):
                return draft_ids[:count]
            now.push(token_id)
        return draft_ids

    def _cut_by_form(self, state: TokenState, draft_ids: Sequence[int]) -> Sequence[int]:
        try:
            progress = self._progress(state)
        except GrammarError:  # it is told where the masks are
            return ()
        return draft_ids[: progress.num_allowed(draft_ids)]

    @property
    def _reasoning_masks(self) -> ReasoningMasks:
        if self._reasoning is None:
            self._reasoning = ReasoningMasks(self._grammars.tokenizer)
        return self._reasoning

    def _thinking(self, state: TokenState) -> ReasoningProgress | None:
        """Advance the output's reasoning to its latest token; None: it has none."""
        reasoning = state.params.stops.reasoning
        if reasoning is None:
            return None
        if state.thinking is None:
            state.thinking = self._reasoning_masks.begin(reasoning)
        state.thinking.follow(state.known_output(state.thinking.num_tokens))
        return state.thinking

    def _progress(self, state: TokenState) -> GrammarProgress:
        """Advance the output's grammar to its latest token; raises `GrammarError`."""
        grammar = state.grammar
        if grammar is None or grammar.is_spent:
            grammar = state.grammar = self._renewed(state, grammar)
        begin = 0 if state.thinking is None else state.thinking.follows_at
        if begin is not None:
            grammar.follow(state.known_output(begin + grammar.num_tokens))
        return grammar

    def _renewed(self, state: TokenState, before: GrammarProgress | None) -> GrammarProgress:
        """The grammar at its beginning; the one before, as long as that can go on meanwhile."""
        wanted = _wanted_by(state)
        if before is not None and before.num_filled:  # another one of its own
            compiled = self._grammars.compile_apart(wanted)
            if (matcher := compiled.new_matcher()) is not None:
                return GrammarProgress(compiled, matcher, before)
        while True:
            future = self._grammars.prepare(wanted, is_awaited=True)
            if before is not None and not before.error and not future.done():
                before.successor = future
                return before
            compiled = future.result()
            matcher = compiled.new_matcher()
            if matcher is not None:
                return GrammarProgress(compiled, matcher, before)

    def _compute(self, wanted: Sequence[Wanted]) -> Mapping[int, Allowed]:
        """Compute the masks of all items; a grammar's error affects its own item alone."""
        allowed: dict[int, Allowed] = {}
        self._compute_once(wanted, allowed)
        failed: dict[CompiledGrammar, list[Wanted]] = {}
        for item in wanted:
            grammar = item[1].grammar
            if grammar is None or not grammar.error:
                continue
            grammar.compiled.spend()
            if grammar.may_go_on_anew:
                failed.setdefault(grammar.compiled, []).append(item)
        for items in failed.values():
            self._compute_anew(items, allowed)
        for index, state, _ in wanted:
            if state.grammar is not None and (problem := state.grammar.error):
                allowed[index] = GrammarError(words_of(problem))
        return allowed

    def _compute_anew(self, items: Sequence[Wanted], allowed: dict[int, Allowed]) -> None:
        """Compute the masks of items that shared a lexer which has failed, with new ones.

        Each half shares one. So an output that makes lexers fail is alone after few compilations,
        and the others are not compiled for one by one.
        """
        half = len(items) // 2
        for part in (items[:half], items[half:]):
            if not part:
                continue
            compiled = self._grammars.compile_apart(_wanted_by(part[0][1]))
            if not all(self._follows(item, compiled, allowed) for item in part):
                compiled.spend()
                if len(part) > 1:
                    self._compute_anew(part, allowed)

    def _follows(
        self, item: Wanted, compiled: CompiledGrammar, allowed: dict[int, Allowed]
    ) -> bool:
        """Compute the masks of an item with this grammar; return whether it had no error."""
        _, state, _ = item
        matcher = compiled.new_matcher()
        if matcher is None:  # the others' masks have taken all that it may learn
            return False
        state.grammar = GrammarProgress(compiled, matcher, state.grammar)
        self._compute_once([item], allowed)
        return not state.grammar.error

    def _compute_once(self, wanted: Sequence[Wanted], allowed: dict[int, Allowed]) -> None:
        rows = allocate_token_bitmask(sum(len(ids) + 1 for _, _, ids in wanted), self.vocab_size)
        filling = _Filling()
        begin = 0
        for index, state, draft_ids in wanted:
            own = rows[begin : begin + len(draft_ids) + 1]
            try:
                if self._begin_rows(state, draft_ids, filling, own, begin):
                    allowed[index] = own
            except GrammarError as error:
                allowed[index] = error
            begin += len(own)
        begun, cpu = time.monotonic(), time.process_time()
        self._fill(filling.plain, filling.drafted, rows)
        # Neither while others have the core, nor what other threads compute.
        took = min(time.monotonic() - begun, time.process_time() - cpu)
        seconds = took / max(len(filling.used), 1)
        for compiled in filling.used:
            compiled.charge(seconds)
        for row, token_ids in filling.beside:
            allow(rows[row], token_ids)

    def _begin_rows(
        self,
        state: TokenState,
        draft_ids: Sequence[int],
        filling: _Filling,
        rows: TokenMasks,
        begin: int,
    ) -> bool:
        """Write the masks in an output's reasoning; note those that its grammar is to fill.

        Args:
            state: the output.
            draft_ids: the drafts of its next tokens.
            filling: gets the rows for the grammar.
            rows: the masks of the next token and of those after the drafts, which allow all.
            begin: the index of the first row among all outputs'.

        Returns:
            whether anything may be forbidden.
        """
        thinking, has_form = self._thinking(state), _has_form(state)
        if thinking is None or (has_form and thinking.phase is ReasoningPhase.BEHIND):
            filling.add(self._progress(state), begin, draft_ids)
            return True
        reasoning, is_masked = self._reasoning_masks, False
        now = thinking.copy() if draft_ids else thinking
        for count, row in enumerate(rows):
            if has_form and now.phase is ReasoningPhase.UNDECIDED:
                self._begin_undecided(state, filling, row, begin + count)
                return True
            if has_form and now.has_ended:
                filling.add(self._progress(state), begin + count, draft_ids[count:])
                filling.beside.append((begin + count, reasoning.gaps(now)))
                return True
            forced = reasoning.forced(now, state.params)
            if forced is not None:
                row[:] = 0
                allow(row, [forced])
            elif has_form:
                kept = reasoning.that_say_no_more(now, state.params)
                if kept is not None:
                    row &= kept
                    is_masked = True
            is_masked = is_masked or forced is not None
            if count < len(draft_ids):
                now.push(draft_ids[count])
        return is_masked

    def _begin_undecided(
        self, state: TokenState, filling: _Filling, row: TokenMasks, place: int
    ) -> None:
        """Write the mask of an output that begins with reasoning or with its form."""
        grammar, output_ids = self._progress(state), state.known_output_ids
        openings = self._reasoning_masks.openings(state.params, output_ids)
        filling.beside.append((place, openings))
        if not output_ids:
            filling.add(grammar, place, ())
            return
        matcher = grammar.matcher.deep_copy()
        if matcher.consume_tokens(output_ids):
            filling.used.append(grammar.compiled)
            filling.plain.append((matcher, place))
        elif openings:
            row[:] = 0
        else:
            raise GrammarError("the output does not begin as its form does")

    def _fill(
        self,
        plain: list[tuple[LLMatcher, int]],
        drafted: list[tuple[LLMatcher, int, list[int]]],
        rows: TokenMasks,
    ) -> None:
        """Compute all masks; the interpreter's lock is free meanwhile."""
        if self._filler is None:
            self._filler = LLExecutor(1)
        if plain:
            fill_next_token_bitmask_par(self._filler, plain, rows)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._filler, drafted, rows)


class _Filling:
    """The masks that grammars are to fill."""

    def __init__(self) -> None:
        self.plain: list[tuple[LLMatcher, int]] = []
        """Matchers, each with its row."""
        self.drafted: list[tuple[LLMatcher, int, list[int]]] = []
        """Matchers, each with its first row and the drafts of the next ones."""
        self.used: list[CompiledGrammar] = []
        self.beside: list[tuple[int, Sequence[int]]] = []
        """Rows, each with tokens that are allowed beside those of the grammar."""

    def add(self, grammar: GrammarProgress, row: int, draft_ids: Sequence[int]) -> None:
        """Note a grammar's rows, from the first one on."""
        self.used.append(grammar.compiled)
        if draft_ids:
            self.drafted.append((grammar.matcher, row, list(draft_ids)))
        else:
            self.plain.append((grammar.matcher, row))


def _has_form(state: TokenState) -> bool:
    return state.params.sampling.structured_output is not None


def _wanted_by(state: TokenState) -> StructuredOutput:
    """The form of an output that has one."""
    wanted = state.params.sampling.structured_output
    assert wanted is not None
    return wanted
