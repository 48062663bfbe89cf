"""Steps of decode as CUDA graphs: one for each of some numbers of sequences, and one for drafts.

A graph reads and writes the same addresses each time. So a step's arrays are padded to the shape of
the next larger graph. One copy from pinned memory brings all of them to the addresses that the
graph was captured with. FlashInfer plans outside of the graph, also into fixed memory, and
only if the plan would be another one. Then all kernels are launched at once.

A step in which each sequence brings one token has a graph of one row a sequence. If some bring
more, because their drafts are verified, each takes as many rows as a sequence brings at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.device.device_streams import PASSED, DeviceEvent, Staging, StagingSet
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.flashinfer_attention import FlashInferAttention
from kvrelay.model_runner.attention.flashinfer_buffers import HostArray, StepBlock
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.config.cuda_graphs import GraphRoom, GraphShape
from kvrelay.model_runner.graphs.capture import Capture, Graph
from kvrelay.model_runner.graphs.graph_step import GraphStep
from kvrelay.model_runner.graphs.padding import PaddedBatch, empty_batch, pad_batch, tokens_each
from kvrelay.model_runner.layers.decoder import Decoder, StepInputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StaticStep:
    """The memory of the steps of one graph."""

    block: StepBlock
    inputs: StepInputs
    attention: Sequence[GraphStep]
    """The attention of each pool."""

    def fill(
        self, padded: PaddedBatch, staging: StagingSet, before_plan: Callable[[], None]
    ) -> torch.Tensor | None:
        """Fill the memory with `padded`, which is launched next. Not to be captured.

        Args:
            padded: the batch.
            staging: the memory that its arrays are copied from.
            before_plan: called before kernels are planned anew.

        Returns:
            The rows of the graph whose logits are wanted; None: its first ones.
        """
        batch = padded.batch
        pools = [
            step.lay_out(padded, table)
            for step, table in zip(self.attention, batch.page_tables, strict=True)
        ]
        fixed: list[HostArray] = [
            padded.spread(batch.input_ids),
            padded.spread(batch.positions),
        ]
        for pool in pools:
            fixed += pool.arrays
        pending = batch.pending
        others = [] if pending is None else [padded.rows[pending.places], pending.sources]
        wanted = padded.rows[batch.logit_rows]
        are_first = np.array_equal(wanted, np.arange(len(wanted)))
        if not are_first:
            others.append(wanted)
        changes = [one for pool in pools if (one := pool.changes) is not None]
        arrived = iter(self.block.send([*fixed, *others, *changes], staging)[len(fixed) :])
        if pending is not None:
            places, sources = next(arrived), next(arrived)
            self.inputs.input_ids.index_copy_(0, places, pending.sampled[sources])
        rows = None if are_first else next(arrived)
        for step, pool in zip(self.attention, pools, strict=True):
            step.place(pool, None if pool.changes is None else next(arrived), before_plan)
        return rows


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """The graph of the steps of one shape."""

    step: StaticStep
    graph: Graph
    logits: torch.Tensor
    """``[rows, vocab_size]`` float32, written by the graph: the first rows of all graphs'."""


class DecodeGraphs:
    """The graphs of one model over its pools, captured and launched on the calling thread.

    Args:
        decoder: the model.
        backends: the pools' backends.
        pools: the last page of each, which belongs to no request, is its dummy page.
        room: the shapes of graphs, and the longest sequence.
        logits: ``[most rows, vocab_size]`` float32, which all graphs write. With logits of their
            own they would take memory for the sum of all shapes.
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
        self._rows = torch.arange(room.most_rows, device=pools[0].data.device)
        """The rows whose logits are computed: all."""
        self._page_size = pools[0].geometry.page_size
        self._graphs: dict[GraphShape, DecodeGraph] = {}

    def capture_all(self) -> None:
        """Capture all graphs, the largest first: others then fit into its memory. Takes seconds."""
        for shape in sorted(self._room.shapes, key=lambda one: one.rows, reverse=True):
            logger.info("capturing the CUDA graph of %d sequences of %d tokens", *shape)
            self._graphs[shape] = self._capture_one(shape)

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The logits of ``batch.logit_rows``; None, with nothing done, if no graph fits.

        They are a copy, as all graphs write to the same memory: they may be read after the next
        forward.
        """
        shape = self._shape_for(batch)
        if shape is None:
            return None
        chosen = self._graphs[shape]
        rows = self._fill(chosen.step, self._pad(batch, shape))
        chosen.graph.replay()
        if rows is None:
            return chosen.logits[: len(batch.logit_rows)].clone()
        return chosen.logits[rows]

    def _pad(self, batch: ForwardBatch, shape: GraphShape) -> PaddedBatch:
        return pad_batch(batch, shape, self._dummy_pages, self._page_size)

    def _fill(self, step: StaticStep, padded: PaddedBatch) -> torch.Tensor | None:
        # FlashInfer copies a plan from memory that the next plan overwrites, so wait for that.
        # The copies come behind the step before the latest, whose results are on the host already.
        staging = self._staging.begin()
        try:
            return step.fill(padded, staging, self._filled.wait)
        finally:  # what fails may have launched copies
            self._filled = self._record()
            staging.use_until(self._filled)

    def _shape_for(self, batch: ForwardBatch) -> GraphShape | None:
        # A draft model's sequences may be longer than those that it was made for.
        each = tokens_each(batch)
        if each == 0 or batch.seq_lens.max() > self._room.max_tokens:
            return None
        shape = self._room.shape_of(len(batch.seq_lens), each)
        # Several choices begin with the logits of one token.
        if shape is None or len(batch.logit_rows) > shape.rows:
            return None
        # FlashInfer plans no sequence for more queries than it has tokens.
        return shape if batch.seq_lens.min() >= shape.each else None

    def _capture_one(self, shape: GraphShape) -> DecodeGraph:
        attention = [GraphStep(one, pool, shape) for pool, one in enumerate(self._backends)]
        block = attention[0].buffers.block
        arrays = block.arrays(shape)
        inputs = StepInputs(arrays.input_ids, arrays.positions, self._rows[: shape.rows])
        step = StaticStep(block, inputs, attention)
        pages = -(-shape.each // self._page_size)
        self._fill(step, self._pad(empty_batch(len(attention), pages), shape))
        logits = self._logits[: shape.rows]

        def work() -> None:
            logits.copy_(self._decoder.compute(step.inputs, step.attention))

        # What compiles, loads or allocates when it is first used must have done so.
        work()
        self._wait()
        return DecodeGraph(step, self._capture(work), logits)
