"""Sequences that tests step through a runner by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.backend import AttentionFactory
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.runner import ModelRunner


def attention_of(runner: ModelRunner) -> AttentionFactory:
    """The factory of the attention of a model that our code computes."""
    assert isinstance(runner._attention, AttentionFactory)
    return runner._attention


class Sequences:
    """Sequences of one runner on shuffled pages, stepped by hand.

    In pools with a window, what no later token sees is gone before each step:
    its table's entries are -1 and its pages NaN.
    """

    def __init__(
        self,
        runner: ModelRunner,
        count: int,
        capacity: int,
        page_size: int = 3,
        order: PageOrder = PageOrder.PAGE_FIRST,
    ) -> None:
        geometries = runner.make_geometries(page_size, order)
        pages_each = geometries[0].pages_for(capacity)
        total = count * pages_each + 5
        dummy = runner.dummy_pages
        self.pools = [
            KVPool(geometry, total + dummy, runner.device, dummy) for geometry in geometries
        ]
        self.page_tables = []
        for seed, pool in enumerate(self.pools):
            # What lies in a page before it is written must not matter, were it NaN.
            pool.data.fill_(torch.nan)
            shuffled = np.random.default_rng(seed).permutation(total)[: count * pages_each]
            self.page_tables.append(shuffled.reshape(count, pages_each).astype(np.int32))
        runner.bind(self.pools)
        self.seq_lens = [0] * count
        self._runner = runner

    def batch(
        self, new: dict[int, Sequence[int]], logit_rows: Sequence[int] | None = None
    ) -> ForwardBatch:
        """The next tokens of some sequences; the logits of all rows unless told."""
        for i in new:
            self._evict(i)
        earlier = [self.seq_lens[i] for i in new]
        for i, tokens in new.items():
            self.seq_lens[i] += len(tokens)
        query_start = np.cumsum([0, *map(len, new.values())]).astype(np.int32)
        rows = range(query_start[-1]) if logit_rows is None else logit_rows
        return ForwardBatch(
            input_ids=np.concatenate([np.array(tokens, np.int64) for tokens in new.values()]),
            positions=np.concatenate(
                [np.arange(n, self.seq_lens[i]) for i, n in zip(new, earlier, strict=True)]
            ),
            query_start=query_start,
            seq_lens=np.array([self.seq_lens[i] for i in new], np.int32),
            page_tables=tuple(self._begun_pages(table, list(new)) for table in self.page_tables),
            logit_rows=np.array(rows, np.int64),
        )

    def forward(
        self, new: dict[int, Sequence[int]], logit_rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """`batch`, run."""
        return self._runner.forward(self.batch(new, logit_rows))

    def _begun_pages(self, table: Int32Array, rows: list[int]) -> Int32Array:
        """The rows of a table, with no pages past the end of their sequences."""
        page_size, begun = self.pools[0].geometry.page_size, table[rows]
        for row, index in zip(begun, rows, strict=True):
            row[-(-self.seq_lens[index] // page_size) :] = -1
        return begun

    def _evict(self, index: int) -> None:
        """What the next token of a sequence does not see."""
        for pool, table in zip(self.pools, self.page_tables, strict=True):
            if pool.geometry.window is None:
                continue
            unseen = max(0, self.seq_lens[index] - pool.geometry.window + 1)
            gone = table[index, : unseen // pool.geometry.page_size]
            for layer in range(pool.geometry.num_layers):
                pool.layer(layer)[gone[gone >= 0]] = torch.nan
            gone[:] = -1
