"""The model that counts, over pages of integers, and a real one over pages of its own."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.executor.grammar_masks import GrammarMasks
from kvrelay.engine.executor.model_executor import Drafter, ModelExecutor
from kvrelay.engine.executor.pending_drafts import PendingDrafts
from kvrelay.engine.executor.token_state import UNKNOWN, TokenState
from kvrelay.engine.worker.loading import load_model
from kvrelay.kv_transfer.checksums import LocalPage, written_bytes
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.byte_sum import hash_bytes
from kvrelay.mem_cache.convert import copy_pages
from kvrelay.mem_cache.host.tier_copies import PageMoves, copy_moves
from kvrelay.mem_cache.leases.publishing import PageCopy
from kvrelay.mem_cache.shape import PoolShape
from kvrelay.model_runner.batch import ForwardBatch, input_ids_on
from kvrelay.model_runner.sampling.sampler import SamplingRow, sample_token_id
from kvrelay.model_runner.sampling.token_counts import TokenCounts
from kvrelay.wire.submit import SamplingParams
from tests.late_device import LateStreams, draw, score

VOCAB = 97
Windows = tuple[int | None, ...]
"""For each pool what its layers look back; None: everything."""
GREEDY = SamplingParams(temperature=0)


FULL: Windows = (None,)


def next_value(contexts: Iterable[Sequence[int] | np.ndarray]) -> int:
    """What the counting model makes of what each pool's layers see."""
    value = 0
    for context in contexts:
        weights = np.arange(len(context), 0, -1) ** 2
        value = value * 31 + len(context) + int(np.dot(context, weights))
    return value % VOCAB


LOGITS = np.random.default_rng(0).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)
"""The counting model's after each value."""


def next_token(tokens: Sequence[int], row: SamplingRow, windows: Windows) -> int:
    """The token that a plain run samples after `tokens`."""
    value = next_value(tokens[-window if window else 0 :] for window in windows)
    token_id = sample_token_id(LOGITS[value], row)
    assert isinstance(token_id, int)
    return token_id


_OUTPUTS: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
"""The longest that was asked for, by prompt, windows, sampling and choice."""


def reference(
    prompt: Sequence[int],
    max_tokens: int,
    windows: Windows = FULL,
    sampling: SamplingParams = GREEDY,
    choice: int = 0,
) -> list[int]:
    """The output of a run that nothing disturbs. Many tests ask for the same ones again."""
    output = _OUTPUTS[tuple(prompt), windows, repr(sampling), choice]
    while len(output) < max_tokens:
        tokens = [*prompt, *output]
        row = SamplingRow(sampling, len(tokens), prompt, output.copy(), choice=choice)
        output.append(next_token(tokens, row, windows))
    return output[:max_tokens]


class GuessDrafter:
    """Guesses right as often as it is told to; on a device that works late, there."""

    def __init__(
        self, seed: int, windows: Windows, device: LateStreams | None = None, right: float = 0.7
    ) -> None:
        self._random = random.Random(seed)
        self._windows = windows
        self._device = device
        self._right = right
        self.begun = 0
        """How often its guesses have stayed on the device."""

    def follow(self, batch: ForwardBatch) -> None:
        """Keeps no KV."""

    def propose(self, states, rows, counts, page_tables) -> list[list[int]]:
        return [self._guess(*each) for each in zip(states, rows, counts, strict=True)]

    def begin(self, states, rows, counts, page_tables) -> PendingDrafts | None:
        if self._device is None:
            return None
        self.begun += 1
        guesses = self.propose(states, rows, counts, page_tables)
        made = torch.tensor([token for one in guesses for token in one], dtype=torch.int64)
        ids, places = torch.full_like(made, UNKNOWN), iter(range(len(made)))
        self._device.forward.launch(lambda: ids.copy_(made))
        return PendingDrafts(ids, [[next(places) for _ in one] for one in guesses])

    def _guess(self, state: TokenState, row: SamplingRow, count: int) -> list[int]:
        tokens = list(state.token_ids)
        for _ in range(self._random.randint(0, count)):
            guess = next_token(tokens, row.after(tokens[len(state.token_ids) :]), self._windows)
            right = self._random.random() < self._right
            tokens.append(guess if right else self._random.randrange(VOCAB))
        return tokens[len(state.token_ids) :]


NOBODYS = -3
"""In pages: no token's."""


class CountingModel:
    """Reads and writes token ids in pages; its logits are sure of `next_token`."""

    def __init__(
        self,
        shapes: Sequence[PoolShape],
        page_size: int,
        drafter: Drafter | None,
        device: LateStreams | None = None,
        counted_rows: int = 3,
        masks: GrammarMasks | None = None,
    ) -> None:
        self.windows = [shape.window for shape in shapes]
        self.page_size = page_size
        self.kv = [np.full((shape.total_pages, page_size), -1, np.int64) for shape in shapes]
        self.broken: set[int] = set()
        """Sequences of the next batch whose logits are not finite."""
        self.fails = ""
        """The error that the next forward ends with, if any."""
        counts = None if device is None else TokenCounts(counted_rows, VOCAB, torch.device("cpu"))
        late_draw = None if counts is None else partial(draw, counts=counts.entries)
        self.executor = ModelExecutor(
            self,
            self._copy,
            drafter,
            masks,
            streams=device,
            draw=late_draw,
            counts=counts,
            score=None if device is None else score,
        )

    def make_host(self, totals: Sequence[int]) -> None:
        """Have a host pool beside each pool."""
        self.host_kv = [np.full((pages, self.page_size), -2, np.int64) for pages in totals]

    def copy_tier(self, moves: PageMoves) -> None:
        """Make a copy between the device and the host."""
        for kv, host, here, there in self._sides(moves):
            if moves.to_host:
                host[there] = kv[here]
            else:
                kv[here] = host[there]

    def _sides(self, moves: PageMoves) -> Iterator[tuple[np.ndarray, ...]]:
        """For each pool the device's, the host's, and the pages of each that are copied."""
        return zip(self.kv, self.host_kv, moves.device_pages, moves.host_pages, strict=True)

    def spoil_tier(self, moves: PageMoves) -> None:
        """What a copy leaves that fails: a half of its pages, and nobody's bytes."""
        self.copy_tier(moves)
        for kv, host, here, there in self._sides(moves):
            half = len(here) // 2
            if moves.to_host:
                host[there[half:]] = NOBODYS
            else:
                kv[here[half:]] = NOBODYS

    def read(self, peer: SimModel, pull: Pull) -> None:
        """Move one read's bytes as they are on the other side now."""
        assert isinstance(peer, CountingModel)
        source = peer.host_kv if pull.from_host else peer.kv
        pages = zip(self.kv, pull.local_pages, source, pull.remote_pages, strict=True)
        for kv, local, theirs, remote in pages:
            kv[local] = theirs[remote]

    def sum(self, page: LocalPage) -> int:
        """The hash of the tokens on a page whose KV is written."""
        kv = (self.host_kv if page.in_host else self.kv)[page.place.pool]
        return hash_bytes(kv[page.page_id, : page.tokens].view(np.uint8))

    def launch(self, batch: ForwardBatch) -> torch.Tensor:
        if self.fails:
            raise RuntimeError(self.fails)
        ids = input_ids_on(batch, torch.device("cpu")).numpy()
        assert ((ids >= 0) & (ids < VOCAB)).all(), "no tokens"
        logits = np.zeros((len(batch.logit_rows), VOCAB), np.float32)
        owners = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start))
        for index in range(len(batch.seq_lens)):
            self._write(batch, index, ids)
        for row, token in enumerate(batch.logit_rows.tolist()):
            index = int(owners[token])
            seen = self._context(batch, index, int(batch.positions[token]) + 1)
            logits[row] = LOGITS[next_value(seen)]
            if index in self.broken:
                logits[row] = np.nan
        return torch.from_numpy(logits)

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            self.kv[copy.pool][copy.target] = self.kv[copy.pool][copy.source]

    def _write(self, batch: ForwardBatch, index: int, input_ids: np.ndarray) -> None:
        first, last = batch.query_start[index : index + 2]
        at, ids = batch.positions[first:last], input_ids[first:last]
        for kv, tables in zip(self.kv, batch.page_tables, strict=True):
            pages = tables[index][at // self.page_size]
            # A window need not be there for the tokens that it has passed already.
            kv[pages[pages >= 0], (at % self.page_size)[pages >= 0]] = ids[pages >= 0]

    def _context(self, batch: ForwardBatch, index: int, length: int) -> Iterator[np.ndarray]:
        for kv, tables, window in zip(self.kv, batch.page_tables, self.windows, strict=True):
            seen = np.arange(max(0, length - window) if window else 0, length)
            pages = tables[index][seen // self.page_size]
            assert (pages >= 0).all(), "a page of the window has left"
            yield kv[pages, seen % self.page_size]


class RealModel:
    """A model of a checkpoint, over pools of its own."""

    fails = ""
    """Steps of a real model are not made to fail."""

    def __init__(self, config: WorkerConfig, device: LateStreams | None = None) -> None:
        model = load_model(config)
        self.pools, self.executor = model.pools, model.executor
        if device is not None:
            first, vocab = model.executor, model.runner.config.vocab_size
            counts = TokenCounts(2, vocab, torch.device("cpu"))
            late_draw = partial(draw, counts=counts.entries)
            self.executor = ModelExecutor(
                model.runner,
                first._copy,
                first._drafter,
                first._masks,
                device,
                late_draw,
                counts,
                score,
            )
        self.host_pools, self.digest = model.host_pools, model.digest
        self.broken: set[int] = set()

    def copy_tier(self, moves: PageMoves) -> None:
        """Make a copy between the device and the host."""
        copy_moves(moves, self.pools, self.host_pools)

    def read(self, peer: SimModel, pull: Pull) -> None:
        """Copy the pages that a peer's pools hold now."""
        assert isinstance(peer, RealModel)
        source = peer.host_pools if pull.from_host else peer.pools
        pages = zip(self.pools, pull.local_pages, source, pull.remote_pages, strict=True)
        for pool, local, theirs, remote in pages:
            copy_pages(theirs, remote, pool, local)

    def sum(self, page: LocalPage) -> int:
        """The hash of a page's bytes as far as they are written."""
        pools = self.host_pools if page.in_host else self.pools
        return hash_bytes(written_bytes(pools[page.place.pool], page.page_id, page.tokens))


SimModel = CountingModel | RealModel
