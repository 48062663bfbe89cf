"""A model runner that is stepped by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_kit.stages.bench import Bench
from kvrelay.mem_cache.geometry import Int64Array
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.config.cuda_graphs import GraphOptions, GraphSizes
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.runner import ModelRunner

PAGE_SIZE = 16


class Driver:
    """Sequences over pools of a runner's own.

    Args:
        bench: the device.
        folder: a checkpoint.
        rows: the number of sequences.
        capacity: the tokens of each.
        graphs: the sizes of CUDA graphs; empty: none.
        moe_backend: what computes experts.
    """

    def __init__(
        self,
        bench: Bench,
        folder: Path,
        rows: int,
        capacity: int,
        graphs: Sequence[int] = (),
        moe_backend: MoEBackend = MoEBackend.AUTO,
    ) -> None:
        self._bench = bench
        options = GraphOptions(GraphSizes(tuple(graphs)), PAGE_SIZE) if graphs else None
        begun = time.perf_counter()
        self.runner = ModelRunner(
            folder,
            "bfloat16",
            str(bench.device),
            moe_backend=moe_backend,
            graphs=options if bench.on_gpu else None,
        )
        self.load_seconds = time.perf_counter() - begun
        dummy = self.runner.dummy_pages
        each = -(-capacity // PAGE_SIZE)
        self._pools = [
            KVPool(one, rows * each + dummy, self.runner.device, dummy)
            for one in self.runner.make_geometries(PAGE_SIZE)
        ]
        for pool in self._pools:  # what was never written must not matter, nor may it be zeros
            pool.data.view(torch.uint8).random_(0, 60)
        self.runner.bind(self._pools)
        self.warm_seconds = self._seconds(self.runner.warm_up)
        self.capture_seconds = self._seconds(self.runner.capture_graphs)
        shuffled = np.random.default_rng(0).permutation(rows * each).astype(np.int32)
        self._table = shuffled.reshape(rows, each)
        self._rng = np.random.default_rng(1)

    def _seconds(self, work: Callable[[], object]) -> float:
        begun = time.perf_counter()
        work()
        self._bench.wait()
        return time.perf_counter() - begun

    def drop_graphs(self) -> None:
        """Launch steps kernel by kernel from now on."""
        self.runner.bind(self._pools)

    def decode(self, rows: int, context: int) -> ForwardBatch:
        """Make a step of `rows` sequences of `context` tokens, each with a new one."""
        return self.batch([1] * rows, [context - 1] * rows)

    def prompt(self, chunk: int, before: int) -> ForwardBatch:
        """Make a chunk of one prompt that may take the pages of all sequences."""
        return self._batch([chunk], [before], self._table.reshape(1, -1), None, all_rows=False)

    def batch(
        self,
        new: Sequence[int],
        before: Sequence[int],
        ids: Int64Array | None = None,
        *,
        all_rows: bool = False,
    ) -> ForwardBatch:
        """Make a step of the first `len(new)` sequences, with so many tokens behind `before`."""
        return self._batch(new, before, self._table, ids, all_rows=all_rows)

    def _batch(
        self,
        new: Sequence[int],
        before: Sequence[int],
        table: np.ndarray[tuple[int, int], np.dtype[np.int32]],
        ids: Int64Array | None,
        *,
        all_rows: bool,
    ) -> ForwardBatch:
        starts = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
        ends = np.array(before) + np.array(new)
        if ids is None:
            ids = self._rng.integers(2, self.runner.config.vocab_size, starts[-1])
        pages = -(-int(ends.max()) // PAGE_SIZE)
        rows = np.arange(starts[-1]) if all_rows else starts[1:] - 1
        return ForwardBatch(
            input_ids=np.asarray(ids, np.int64),
            positions=np.concatenate(
                [np.arange(first, end) for first, end in zip(before, ends, strict=True)]
            ),
            query_start=starts,
            seq_lens=ends.astype(np.int32),
            page_tables=(table[: len(new), :pages],) * len(self._pools),
            logit_rows=rows.astype(np.int64),
        )
