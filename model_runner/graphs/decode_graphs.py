"""Steps of decode as CUDA graphs: one for each of some numbers of sequences.

A graph reads and writes the same addresses each time. So a step's arrays are padded to the size of
the next larger graph. One copy from pinned memory brings all of them to the addresses that the
graph was captured with. FlashInfer plans outside of the graph, also into fixed memory, and
only if the plan would be another one. Then all kernels are launched at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvrelay.device.device_streams import PASSED, DeviceEvent, Staging, StagingSet
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.flashinfer_attention import FlashInferAttention
from kvrelay.model_runner.attention.flashinfer_buffers import HostArray, StepBlock
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, Int64Array
from kvrelay.model_runner.config.cuda_graphs import GraphRoom
from kvrelay.model_runner.graphs.capture import Capture, Graph
from kvrelay.model_runner.graphs.graph_step import GraphStep
from kvrelay.model_runner.layers.decoder import Decoder, StepInputs
from kvrelay.model_runner.torch_options import pin_to_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StaticStep:
    """The memory of the steps of one graph's size."""

    block: StepBlock
    inputs: StepInputs
    attention: Sequence[GraphStep]
    """The attention of each pool."""

    def fill(
        self, padded: ForwardBatch, staging: StagingSet, before_plan: Callable[[], None]
    ) -> None:
        """Fill the memory with `padded`, which is launched next. Not to be captured.

        Args:
            padded: the batch.
            staging: the memory that its arrays are copied from.
            before_plan: called before kernels are planned anew.
        """
        pools = [
            step.lay_out(padded, table)
            for step, table in zip(self.attention, padded.page_tables, strict=True)
        ]
        fixed: list[HostArray] = [padded.input_ids, padded.positions]
        for pool in pools:
            fixed += pool.arrays
        pending = padded.pending
        awaited = [] if pending is None else [pending.places, pending.sources]
        changes = [pool.changes for pool in pools]
        sent = [one for one in changes if one is not None]
        arrived = self.block.send([*fixed, *awaited, *sent], staging)[len(fixed) :]
        if pending is not None:
            places, sources, *arrived = arrived
            self.inputs.input_ids.index_copy_(0, places, pending.sampled[sources])
        left = iter(arrived)
        for step, pool in zip(self.attention, pools, strict=True):
            step.place(pool, None if pool.changes is None else next(left), before_plan)


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """The graph of the steps of one size."""

    step: StaticStep
    graph: Graph
    logits: torch.Tensor
    """``[size, vocab_size]`` float32, written by the graph: the first rows of all graphs'."""


class DecodeGraphs:
    """The graphs of one model over its pools, captured and launched on the calling thread.

    Args:
        decoder: the model.
        backends: the pools' backends.
        pools: the last page of each, which belongs to no request, is its dummy page.
        room: the sizes of graphs, and the longest sequence.
        logits: ``[largest size, vocab_size]`` float32, which all graphs write. With logits of their
            own they would take memory for the sum of all sizes.
        capture: records a graph.
        wait: returns when launched work is done.
        staging: the memory that steps' arrays are copied from.
        record: returns an event behind the work that was launched on the current stream.
    """

    def __init__(
        self,
        decoder: Decoder,
        backends: Sequence[FlashInferAttention],
        pools: Sequence[KVPool],
        room: GraphRoom,
        logits: torch.Tensor,
        capture: Capture,
        wait: Callable[[], None],
        staging: Staging,
        record: Callable[[], DeviceEvent],
    ) -> None:
        assert all(pool.reserved_pages for pool in pools), "each page may be a request's"
        self._decoder = decoder
        self._backends = backends
        self._dummy_pages = [pool.total_pages - 1 for pool in pools]
        self._room = room
        self._logits = logits
        self._capture = capture
        self._wait = wait
        self._record = record
        self._filled: DeviceEvent = PASSED
        """The event behind the copies of the latest step's arrays and plans."""
        self._staging = staging
        self._rows = torch.arange(room.sizes.largest, device=pools[0].data.device)
        """The rows whose logits are wanted: all."""
        self._graphs: dict[int, DecodeGraph] = {}

    def capture_all(self) -> None:
        """Capture all graphs, the largest first: others then fit into its memory. Takes seconds."""
        for size in reversed(self._room.sizes.sizes):
            logger.info("capturing the CUDA graph of %d sequences", size)
            self._graphs[size] = self._capture_one(size)

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The logits of ``batch.logit_rows``; None, with nothing done, if no graph fits.

        They are a copy, as all graphs write to the same memory: they may be read after the next
        forward.
        """
        size = self._size_for(batch)
        if size is None:
            return None
        chosen = self._graphs[size]
        self._fill(chosen.step, pad_batch(batch, size, self._dummy_pages))
        chosen.graph.replay()
        return _rows_of(chosen.logits, batch.logit_rows)

    def _fill(self, step: StaticStep, padded: ForwardBatch) -> None:
        # FlashInfer copies a plan from memory that the next plan overwrites, so wait for that.
        # The copies come behind the step before the latest, whose results are on the host already.
        staging = self._staging.begin()
        step.fill(padded, staging, self._filled.wait)
        self._filled = self._record()
        staging.use_until(self._filled)

    def _size_for(self, batch: ForwardBatch) -> int | None:
        # A draft model's sequences may be longer than those that it was made for.
        if not is_decode(batch) or batch.seq_lens.max() > self._room.max_tokens:
            return None
        return self._room.sizes.of(len(batch.seq_lens))

    def _capture_one(self, size: int) -> DecodeGraph:
        attention = [GraphStep(one, pool, size) for pool, one in enumerate(self._backends)]
        block = attention[0].buffers.block
        arrays = block.arrays(size)
        inputs = StepInputs(arrays.input_ids, arrays.positions, self._rows[:size])
        step = StaticStep(block, inputs, attention)
        self._fill(step, pad_batch(empty_batch(len(attention)), size, self._dummy_pages))
        logits = self._logits[:size]

        def work() -> None:
            logits.copy_(self._decoder.compute(step.inputs, step.attention))

        # What compiles, loads or allocates when it is first used must have done so.
        work()
        self._wait()
        return DecodeGraph(step, self._capture(work), logits)


def _rows_of(logits: torch.Tensor, rows: Int64Array) -> torch.Tensor:
    if np.array_equal(rows, np.arange(len(rows))):
        return logits[: len(rows)].clone()
    return logits[pin_to_device(rows, logits.device)]


def is_decode(batch: ForwardBatch) -> bool:
    """Whether the batch has sequences, and each brings one token."""
    return len(batch.seq_lens) > 0 and bool((np.diff(batch.query_start) == 1).all())


def empty_batch(num_pools: int) -> ForwardBatch:
    """A batch of no sequences."""
    nothing, lengths = np.empty(0, np.int64), np.empty(0, np.int32)
    tables = (np.empty((0, 1), np.int32),) * num_pools
    return ForwardBatch(nothing, nothing, np.zeros(1, np.int32), lengths, tables, nothing)


def pad_batch(batch: ForwardBatch, size: int, dummy_pages: Sequence[int]) -> ForwardBatch:
    """`batch` (of decode) with further sequences, up to `size` in all.

    Each further sequence has one token, 0, at position 0. It is written to the dummy page of each
    pool, and sees nothing else: no page of a request is touched. The logits of all sequences are
    wanted.
    """
    missing = size - len(batch.seq_lens)
    assert missing >= 0
    zeros, ones = np.zeros(missing, np.int64), np.ones(missing, np.int32)
    return replace(
        batch,
        input_ids=np.concatenate((batch.input_ids, zeros)),
        positions=np.concatenate((batch.positions, zeros)),
        query_start=np.arange(size + 1, dtype=np.int32),
        seq_lens=np.concatenate((batch.seq_lens, ones)),
        page_tables=tuple(
            _pad_table(table, missing, page)
            for table, page in zip(batch.page_tables, dummy_pages, strict=True)
        ),
        logit_rows=np.arange(size, dtype=np.int64),
    )


def _pad_table(table: Int32Array, missing: int, dummy_page: int) -> Int32Array:
    rows = np.full((missing, table.shape[1]), -1, np.int32)
    rows[:, 0] = dummy_page
    return np.concatenate((table, rows))
