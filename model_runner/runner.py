"""The room's front: a model on a device, run batch by batch over one pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention import AttentionBackend, make_attention
from kvrelay.model_runner.batch import ForwardBatch
from kvrelay.model_runner.checkpoint import Checkpoint
from kvrelay.model_runner.decoder import Decoder
from kvrelay.model_runner.model_config import ModelConfig
from kvrelay.model_runner.options import parse_device, parse_dtype


class ModelRunner:
    """Loads a checkpoint and runs forwards, one at a time, on whichever thread calls.

    Args:
        model_path: a folder with config.json and safetensors.
        dtype: bfloat16, float16, float32 or float64; the checkpoint's own does not matter.
        device: ``cpu``, ``cuda``, ``cuda:1`` and so on.
        threads: CPU threads of a forward, set for the whole process; None leaves torch's own.

    Raises:
        CheckpointError: the files are not usable.
        UnsupportedOptionError: an unknown dtype or device, or a device that is not there.
    """

    def __init__(
        self,
        model_path: str | Path,
        dtype: str,
        device: str,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        path = Path(model_path)
        self.config = ModelConfig.from_checkpoint(path)
        self.dtype = parse_dtype(dtype)
        self.device = parse_device(device)
        with torch.inference_mode():
            checkpoint = Checkpoint(path, self.dtype, self.device)
            self._decoder = Decoder(self.config, checkpoint, self.dtype, self.device)
        self._pool: KVPool | None = None
        self._attention: AttentionBackend | None = None

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence, prompt and output."""
        return self.config.max_model_len

    def make_geometry(self, page_size: int, order: PageOrder = PageOrder.PAGE_FIRST) -> KVGeometry:
        """The pages that this model needs."""
        return KVGeometry(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            page_size=page_size,
            order=order,
        )

    def bind(self, pool: KVPool) -> None:
        """Use `pool` from now on; it must be of this model's geometry and on its device."""
        geometry = pool.geometry
        assert geometry == self.make_geometry(geometry.page_size, geometry.order)
        assert pool.data.device.type == self.device.type
        self._pool = pool
        self._attention = make_attention(pool, self.config.num_heads)

    def warm_up(self) -> None:
        """Compile and load what a first forward would have to. May take seconds.

        Runs over a small pool of its own: the bound pool's pages are not touched.
        """
        assert self._pool is not None, "bind a pool first"
        geometry = self._pool.geometry
        scratch = make_attention(KVPool(geometry, 4, self.device), self.config.num_heads)
        with torch.inference_mode():
            # A chunk of two tokens beside a decode row, then one decode row alone.
            for new_tokens in ([2, 1], [1]):
                self._decoder.forward(_warm_up_batch(new_tokens, geometry), scratch)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the batch's keys and values to the bound pool; they are there when it returns.

        Returns:
            ``[S, vocab_size]`` float32 logits of ``batch.logit_rows``, on the device.
        """
        assert self._attention is not None, "bind a pool first"
        with torch.inference_mode():
            logits = self._decoder.forward(batch, self._attention)
        if self.device.type == "cuda":
            # Launched is not done: peers read pages as soon as this returns.
            torch.cuda.current_stream(self.device).synchronize()
        return logits


def _warm_up_batch(new_tokens: list[int], geometry: KVGeometry) -> ForwardBatch:
    """Sequences that begin with `new_tokens` tokens, each with pages of its own."""
    pages_each = geometry.pages_for(max(new_tokens))
    query_start = np.concatenate(([0], np.cumsum(new_tokens))).astype(np.int32)
    return ForwardBatch(
        input_ids=np.zeros(query_start[-1], np.int64),
        positions=np.concatenate([np.arange(n) for n in new_tokens]),
        query_start=query_start,
        seq_lens=np.array(new_tokens, np.int32),
        page_tables=np.arange(len(new_tokens) * pages_each, dtype=np.int32).reshape(
            len(new_tokens), pages_each
        ),
        logit_rows=query_start[1:].astype(np.int64) - 1,
    )
