"""Steps of decode as CUDA graphs: one for each of some numbers of sequences.

A graph reads and writes the same addresses each time. So a step's arrays are padded to the size of
the next larger graph, and copied to the addresses that it was captured with. FlashInfer plans
outside of the graph, also into fixed memory. Then all kernels are launched at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvrelay.device.device_streams import PASSED, DeviceEvent
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.flashinfer_attention import FlashInferAttention
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, Int64Array
from kvrelay.model_runner.config.cuda_graphs import GraphRoom
from kvrelay.model_runner.graphs.capture import Capture, Graph
from kvrelay.model_runner.layers.decoder import Decoder, StepInputs
from kvrelay.model_runner.torch_options import pin_to_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StaticStep:
    """The memory of the steps of one graph's size."""

    inputs: StepInputs
    attention: Sequence[GraphStep]
    """The attention of each pool."""

    def fill(self, padded: ForwardBatch) -> None:
        """Fill the memory with `padded`, which is launched next. Not to be captured."""
        self.inputs.fill(padded)
        for step, table in zip(self.attention, padded.page_tables, strict=True):
            step.fill(padded, table)


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
        record: Callable[[], DeviceEvent] = lambda: PASSED,
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
        """The event behind the copies of the latest step's arrays."""
        self._inputs = StepInputs.zeros(room.sizes.largest, pools[0].data.device)
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
        # FlashInfer copies a plan from memory that the next plan overwrites, so wait for that.
        # The copies come behind the step before the latest, whose results are on the host already.
        self._filled.wait()
        chosen.step.fill(pad_batch(batch, size, self._dummy_pages))
        self._filled = self._record()
        chosen.graph.replay()
        return _rows_of(chosen.logits, batch.logit_rows)

    def _size_for(self, batch: ForwardBatch) -> int | None:
        # A draft model's sequences may be longer than those that it was made for.
        if not is_decode(batch) or batch.seq_lens.max() > self._room.max_tokens:
            return None
        return self._room.sizes.of(len(batch.seq_lens))

    def _capture_one(self, size: int) -> DecodeGraph:
        attention = [GraphStep(one, size) for one in self._backends]
        step = StaticStep(self._inputs.first(size), attention)
        step.fill(pad_batch(empty_batch(len(attention)), size, self._dummy_pages))
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


class GraphStep:
    """The `StepAttention` of all steps of `size` sequences, each with one new token.

    Kernels of `attend` read the arrays that the latest `fill` has left on the device.
    """

    def __init__(self, backend: FlashInferAttention, size: int) -> None:
        self._backend = backend
        geometry = backend.pool.geometry
        buffers, self._wrapper = backend.flashinfer.graph_parts(geometry, size)
        self._new_tokens = backend.static_tokens(buffers.new_pages[:size], buffers.new_slots[:size])

    def fill(self, batch: ForwardBatch, page_table: Int32Array) -> None:
        """Plan for `batch`, and set the places of its new tokens. Not to be captured."""
        geometry = self._backend.pool.geometry
        self._new_tokens.fill(batch, page_table, geometry.page_size)
        self._backend.plan_decode(self._wrapper, *self._backend.lay_out(batch, page_table))

    def attend(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Write and attend; shapes as in `StepAttention.attend`."""
        return self._backend.attend(self._wrapper, self._new_tokens, layer, rows)


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
