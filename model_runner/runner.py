"""A model on a device, run batch by batch over its pools: what the engine uses of model_runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.backend import AttentionBackend, AttentionFactory
from kvrelay.model_runner.attention.choice import AttentionChoice
from kvrelay.model_runner.attention.cpu_attention import CpuAttention
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.checkpoint.checkpoint import Checkpoint
from kvrelay.model_runner.checkpoint.config_reader import read_config
from kvrelay.model_runner.checkpoint.digest import object_digest
from kvrelay.model_runner.config.model_config import MLAConfig
from kvrelay.model_runner.errors import UnsupportedOptionError
from kvrelay.model_runner.layers.decoder import Decoder
from kvrelay.model_runner.layers.elementwise import make_elementwise
from kvrelay.model_runner.layers.elementwise_trial import try_elementwise
from kvrelay.model_runner.layers.linear import LinearFactory
from kvrelay.model_runner.torch_options import parse_device, parse_dtype, wait_for_device

_WARM_UP_CHUNK = 32
"""Tokens: more than a backend computes one by one."""


class ModelRunner:
    """Loads a checkpoint and runs forwards, one at a time, on whichever thread calls.

    Args:
        model_path: a folder with config.json and safetensors.
        dtype: bfloat16, float16, float32 or float64; the checkpoint's own does not matter.
        device: ``cpu``, ``cuda``, ``cuda:1`` and so on.
        threads: CPU threads of a forward, set for the whole process; None leaves torch's own.
        draft: it is the model of a `DraftModel`, whose pools come after its target's.
        batch_invariant: a token's logits must be the same, bit for bit, whatever is computed
            beside it and in whatever chunks: prompts of a thousand tokens take 1.8 times as long,
            steps a few percent longer.
        attention: what computes attention.
        on_read: called with the size of each tensor that was read, in bytes.

    Raises:
        CheckpointError: the files are not usable.
        UnsupportedOptionError: an unknown dtype or device, a device that is not there, one
            that is not batch invariant, or attention that cannot be computed so.
    """

    def __init__(
        self,
        model_path: str | Path,
        dtype: str,
        device: str,
        threads: int | None = None,
        *,
        draft: bool = False,
        batch_invariant: bool = False,
        attention: AttentionChoice = AttentionChoice.AUTO,
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        path = Path(model_path)
        self.config = read_config(path)
        self.dtype = parse_dtype(dtype)
        self.device = parse_device(device)
        if batch_invariant and not CpuAttention.is_invariant(self.device, self.dtype):
            raise UnsupportedOptionError(
                "--batch-invariant is for bfloat16 and float32 on a CPU, "
                f"not for {dtype} on {device}"
            )
        self._draft = draft
        # Before the weights: what cannot be computed is refused at once.
        self._attention = AttentionFactory(
            attention,
            self.make_geometries(page_size=1),
            self.config.attention.query_heads,
            self.device,
            batch_invariant,
        )
        with torch.inference_mode():
            elementwise = make_elementwise(self.dtype, self.device, batch_invariant)
            if batch_invariant:
                try_elementwise(self.config, elementwise, self.dtype)
            checkpoint = Checkpoint(path, self.dtype, self.device, on_read)
            self._decoder = Decoder(
                self.config,
                checkpoint,
                self.dtype,
                self.device,
                LinearFactory(batch_invariant),
                elementwise,
            )
        self.config_digest = object_digest(self.config)
        """Hash of the configuration as it was understood."""
        self.weights_digest = checkpoint.digest
        """Hash of every byte of the weights, in this dtype."""
        self._pools: Sequence[KVPool] = ()
        self._backends: Sequence[AttentionBackend] = ()

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence, prompt and output."""
        return self.config.max_model_len

    def make_geometries(
        self, page_size: int, order: PageOrder = PageOrder.PAGE_FIRST
    ) -> tuple[KVGeometry, ...]:
        """The pages that this model needs, one geometry a pool.

        Layers that see everything share the first pool, those with a window
        another; a model that has only one kind has one pool. A batch's page
        tables are in the same order, a draft model's after its target's.
        """
        heads = self.config.attention
        return tuple(
            KVGeometry(
                num_layers=sum(layer.sliding_window == window for layer in self.config.layers),
                num_kv_heads=heads.num_cached_heads,
                head_dim=heads.cached_head_dim,
                dtype=self.dtype,
                page_size=page_size,
                order=order,
                latent=isinstance(heads, MLAConfig),
                window=window,
                draft=self._draft,
            )
            for window in self.config.pool_windows
        )

    def bind(self, pools: Sequence[KVPool]) -> None:
        """Use `pools` from now on: one for each of this model's geometries, on its device."""
        first = pools[0].geometry
        expected = self.make_geometries(first.page_size, first.order)
        assert tuple(pool.geometry for pool in pools) == expected
        assert all(pool.data.device.type == self.device.type for pool in pools)
        self._pools = tuple(pools)
        self._backends = self._make_backends(pools)

    def warm_up(self) -> None:
        """Compile and load what a first forward would have to. May take seconds.

        Runs over small pools of its own: the bound pools' pages are not touched.
        """
        assert self._pools, "bind pools first"
        pages = 2 * self._pools[0].geometry.pages_for(_WARM_UP_CHUNK)
        scratch = [KVPool(pool.geometry, pages, self.device) for pool in self._pools]
        backends = self._make_backends(scratch)
        with torch.inference_mode():
            # A chunk beside a decode row, a few tokens as when drafts are verified, a row alone.
            for new_tokens in ([_WARM_UP_CHUNK, 1], [3, 1], [1]):
                self._decoder.forward(_warm_up_batch(new_tokens, scratch), backends)
                wait_for_device(self.device)  # before the next plan

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's keys and values to the bound pools; they are there when it returns.

        Args:
            batch: may have the tables of a target's and of its draft model's pools: each
                takes its own.

        Returns:
            ``[S, vocab_size]`` float32 logits of ``batch.logit_rows``, on the device.
        """
        assert self._backends, "bind pools first"
        with torch.inference_mode():
            logits = self._decoder.forward(self._with_own_tables(batch), self._backends)
        # Launched is not done: peers read pages as soon as this returns.
        wait_for_device(self.device)
        return logits

    def own_tables(self, page_tables: Sequence[Int32Array]) -> tuple[Int32Array, ...]:
        """Those of this model's pools among a batch's: a target's come first, a draft's last."""
        count = len(self.config.pool_windows)
        assert len(page_tables) >= count
        return tuple(page_tables[-count:] if self._draft else page_tables[:count])

    def _with_own_tables(self, batch: ForwardBatch) -> ForwardBatch:
        if len(batch.page_tables) == len(self._pools):
            return batch
        return replace(batch, page_tables=self.own_tables(batch.page_tables))

    def _make_backends(self, pools: Sequence[KVPool]) -> tuple[AttentionBackend, ...]:
        return tuple(map(self._attention.make, pools))


def _warm_up_batch(new_tokens: list[int], pools: Sequence[KVPool]) -> ForwardBatch:
    """Sequences that begin with `new_tokens` tokens, each with pages of its own."""
    pages_each = pools[0].geometry.pages_for(max(new_tokens))
    page_table = np.arange(len(new_tokens) * pages_each, dtype=np.int32)
    query_start = np.concatenate(([0], np.cumsum(new_tokens))).astype(np.int32)
    return ForwardBatch(
        input_ids=np.zeros(query_start[-1], np.int64),
        positions=np.concatenate([np.arange(n) for n in new_tokens]),
        query_start=query_start,
        seq_lens=np.array(new_tokens, np.int32),
        page_tables=(page_table.reshape(len(new_tokens), pages_each),) * len(pools),
        logit_rows=query_start[1:].astype(np.int64) - 1,
    )
