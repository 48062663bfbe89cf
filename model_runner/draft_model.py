"""A smaller model that proposes the next tokens of its target.

Speculative decoding is by Leviathan and others 2023 (arXiv 2211.17192) and Chen and others 2023
(arXiv 2302.01318). Here `verify` accepts a draft only if it is the token that the target samples.
The draft model samples with the target's own parameters, seed and positions. So where the two
distributions are alike, their draws are alike, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch

from kvrelay.cpu_kernels.kernel_threads import KernelThreads
from kvrelay.device.device_streams import PASSED, DeviceEvent
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.attention_choice import AttentionChoice, AttentionSplits
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.batch import ForwardBatch, Int32Array, PendingIds
from kvrelay.model_runner.checkpoint.digest import object_digest
from kvrelay.model_runner.config.cuda_graphs import GraphOptions
from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.config.model_config import ModelConfig
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.model_runner.errors import CheckpointError
from kvrelay.model_runner.graphs.capture import Capture, CudaCapture
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.sampling.device_sampler import (
    Draws,
    join_draws,
    launch,
    sample_on_device,
    samples_on,
)
from kvrelay.model_runner.sampling.sampler import (
    Float32Array,
    SamplingRow,
    argmax_rows,
    sample_token_id,
)
from kvrelay.model_runner.transformers_model.configuration import TransformersConfig
from kvrelay.wire.output import SampledToken

_NO_ROWS = np.empty(0, np.int64)
_UNKNOWN = -1
"""A placeholder for a guess that only the device knows."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence whose next tokens are to be guessed."""

    row: SamplingRow
    """The inputs of its next token's choice, as the target will sample it."""
    new_ids: Sequence[int]
    """Its last tokens: all whose draft KV is not written yet; at least one."""
    count: int
    """Tokens to guess; 0 only writes the KV of `new_ids`."""

    @property
    def kv_len(self) -> int:
        """The tokens whose draft KV is written."""
        return self.row.position - len(self.new_ids)

    @property
    def kv_end(self) -> int:
        """The tokens whose draft KV is written once all are guessed; the last guess's is not."""
        return self.row.position + max(0, self.count - 1)

    def row_after(self, guesses: Sequence[int]) -> SamplingRow:
        """The inputs of the choice of the token after these guesses."""
        return self.row if self.row.is_argmax else self.row.after(guesses)

    def kv_len_after(self, guesses: Sequence[int]) -> int:
        """The tokens whose draft KV is right when these were guessed."""
        return min(self.row.position + len(guesses), self.kv_end)


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """The tokens proposed for a `DraftRequest`, and the extent of its draft KV."""

    token_ids: Sequence[int]
    """The proposed tokens; fewer than were asked for if the draft model's logits are not finite."""
    kv_len: int
    """The tokens whose draft KV is written: those before `token_ids`, and these but for their last.

    KV of tokens that the target does not keep is to be written again. Say that the target has kept
    `n` tokens in all, and has not run the last of them yet. Then ``min(kv_len, n - 1)`` tokens have
    valid draft KV. Two tokens are new to the draft model if every guess was kept, else one.
    """


@dataclass(frozen=True, slots=True)
class PendingGuesses:
    """A draft model's guesses that only the device knows; `read` waits for them."""

    sequences: Sequence[DraftRequest]
    draws: Draws | None
    """All guesses; None: none were asked for."""
    places: Sequence[Sequence[int]]
    """For each sequence, the places of its guesses among the draws."""

    @property
    def ids(self) -> torch.Tensor:
        """``[N]`` int64 on the device. A guess by logits that are not finite is any token."""
        assert self.draws is not None, "nothing was guessed"
        return self.draws.ids

    def read(self) -> list[DraftProposal]:
        """Wait for all guesses; those of a sequence end before its first that is no token."""
        tokens = [] if self.draws is None else self.draws.read()
        proposals = []
        for one, places in zip(self.sequences, self.places, strict=True):
            guesses = [tokens[place] for place in places]
            sure = takewhile(lambda guess: isinstance(guess, SampledToken), guesses)
            ids = [guess.token_id for guess in sure if isinstance(guess, SampledToken)]
            proposals.append(DraftProposal(ids, one.kv_len_after(ids)))
        return proposals


def count_dummy_pages(target: ModelRunner, draft: DraftModel | None) -> int:
    """The pages at the end of each pool of both models: one of them may have graphs alone."""
    return max(target.dummy_pages, 0 if draft is None else draft.dummy_pages)


class DraftModel:
    """A draft model beside its target, over its own pools with the same page size and leases.

    `follow` runs its prompts chunk by chunk like the target's, so that it has KV of the whole
    prompt. From then on `propose` writes the KV of the tokens that it is given. A window pool's
    pages must stay as long as the draft model reads them; it may be a token behind the target.

    Args:
        model_path: a checkpoint of any supported architecture with the target's vocabulary.
        dtype: see `ModelRunner`.
        device: see `ModelRunner`.
        attention: see `ModelRunner`.
        kv_dtype: see `ModelRunner`.
        graphs: see `ModelRunner`: a first guess brings one token of each sequence or two, each
            further one one.
        capture: see `ModelRunner`.
        attention_splits: see `ModelRunner`.
        model_code: see `ModelRunner`.
        on_read: see `ModelRunner`.
        kernel_threads: the target's threads.
        moe_backend: see `ModelRunner`.

    Raises:
        CheckpointError: the files are not usable.
        UnsupportedOptionError: an unknown dtype or device, a device that does not exist, or
            attention that cannot be computed with these options.
    """

    def __init__(
        self,
        model_path: str | Path,
        dtype: str,
        device: str,
        attention: AttentionChoice = AttentionChoice.AUTO,
        kv_dtype: KVDtype = KVDtype.AUTO,
        graphs: GraphOptions | None = None,
        capture: Callable[[], Capture] = CudaCapture,
        attention_splits: AttentionSplits = AttentionSplits.BATCH,
        model_code: ModelCode = ModelCode.AUTO,
        on_read: Callable[[int], None] = lambda _: None,
        kernel_threads: KernelThreads | None = None,
        moe_backend: MoEBackend = MoEBackend.AUTO,
    ) -> None:
        self._path = Path(model_path)
        self._runner = ModelRunner(
            model_path,
            dtype,
            device,
            draft=True,
            model_code=model_code,
            attention=attention,
            attention_splits=attention_splits,
            kv_dtype=kv_dtype,
            graphs=graphs,
            capture=capture,
            on_read=on_read,
            kernel_threads=kernel_threads,
            moe_backend=moe_backend,
        )
        self.config = self._runner.config
        self.digest = object_digest((self._runner.config_digest, self._runner.weights_digest))
        """The hash of configuration and weights."""
        self._page_size = 0
        self._latest: DeviceEvent = PASSED
        """The event behind the latest forward that was launched without waiting for it.

        Behind what was launched of it, if it has failed.
        """
        self._before_latest: DeviceEvent = PASSED

    def check_vocab(self, target: ModelConfig | TransformersConfig) -> None:
        """Raise `CheckpointError` unless the target's vocabulary has the same size."""
        if self.config.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"{self._path / 'config.json'}: vocab_size of a draft model must be its "
                f"target's, {target.vocab_size}, not {self.config.vocab_size}"
            )

    def make_geometries(
        self, page_size: int, order: PageOrder = PageOrder.PAGE_FIRST
    ) -> tuple[KVGeometry, ...]:
        """The pages that the draft model needs, one geometry a pool; they follow the target's."""
        return self._runner.make_geometries(page_size, order)

    def bind(self, pools: Sequence[KVPool]) -> None:
        """Use `pools` from now on: one for each of the draft model's geometries, on its device."""
        self._runner.bind(pools)
        self._page_size = pools[0].geometry.page_size

    def warm_up(self) -> None:
        """Compile and load what a first forward needs. May take seconds."""
        self._runner.warm_up()

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs over the bound pools, after `warm_up`. May take a minute."""
        self._runner.capture_graphs()

    def run_largest(self, chunk_tokens: int, rows: int, longest: int) -> None:
        """Run the forwards that take the most memory; see `ModelRunner.run_largest`."""
        for context in self._runner.largest_contexts(longest):
            self._runner.run_largest(chunk_tokens, rows, context)

    def capture_on_scratch(self) -> object:
        """Capture the CUDA graphs over scratch pages; see `ModelRunner.capture_on_scratch`."""
        return self._runner.capture_on_scratch()

    @property
    def dummy_pages(self) -> int:
        """The pages at a pool's end for a graph's padding; see `ModelRunner.dummy_pages`."""
        return self._runner.dummy_pages

    @property
    def scratch_part(self) -> float:
        """The scratch bytes a pool byte; see `ModelRunner.scratch_part`."""
        return self._runner.scratch_part

    def follow(self, batch: ForwardBatch) -> None:
        """Write the draft KV of a batch of the target's, by work on the current stream."""
        self._launch(replace(batch, logit_rows=_NO_ROWS))

    def propose(
        self, sequences: Sequence[DraftRequest], page_tables: Sequence[Int32Array]
    ) -> list[DraftProposal]:
        """Guess each sequence's next tokens, in as many forwards as the largest count asked for.

        Args:
            sequences: the `B` sequences.
            page_tables: ``[B, max_pages]`` for each pool, with pages for the tokens up to
                `DraftRequest.kv_end`. The target's tables may stand before the draft model's.
        """
        if not sequences:
            return []
        if (pending := self.begin(sequences, page_tables)) is not None:
            return pending.read()
        tables = self._own_tables(sequences, page_tables)
        guesses: list[list[int]] = [[] for _ in sequences]
        asked = [index for index, one in enumerate(sequences) if one.count > 0]
        logits = self._forward(_new_batch(sequences, tables, asked))
        while asked:
            going = self._guess(logits, sequences, guesses, asked)
            if not going:
                break
            last = [guesses[index][-1] for index in going]
            at = [sequences[index].row.position + len(guesses[index]) - 1 for index in going]
            logits = self._forward(_one_each_batch(last, at, tables, going))
            asked = going
        return [
            DraftProposal(ids, one.kv_len_after(ids))
            for one, ids in zip(sequences, guesses, strict=True)
        ]

    def begin(
        self, sequences: Sequence[DraftRequest], page_tables: Sequence[Int32Array]
    ) -> PendingGuesses | None:
        """Begin to guess as `propose`, by work on the current stream; the host need not wait.

        Each forward begins with guesses that only the device knows. A sequence whose logits are not
        finite goes on with any token.

        Returns:
            The guesses; None, with nothing done, if the host has to know each before the next.
        """
        # Penalties count the guesses before: the host must know them.
        if not samples_on(self._runner.device) or any(
            one.row.params.reads_output for one in sequences
        ):
            return None
        tables = self._own_tables(sequences, page_tables)
        asked = [index for index, one in enumerate(sequences) if one.count > 0]
        places: list[list[int]] = [[] for _ in sequences]
        drawn: list[Draws] = []
        count = 0
        logits = self._launch(_new_batch(sequences, tables, asked))
        while asked:
            done = len(drawn)
            rows = [sequences[index].row_after([_UNKNOWN] * done) for index in asked]
            draws = launch(logits, rows, logprobs=False)
            drawn.append(draws)
            for place, index in enumerate(asked, count):
                places[index].append(place)
            count += len(asked)
            going = [index for index in asked if sequences[index].count > done + 1]
            if not going:
                break
            sources = np.array([asked.index(index) for index in going], np.int64)
            at = [sequences[index].row.position + done for index in going]
            batch = _one_each_batch([_UNKNOWN] * len(going), at, tables, going)
            pending = PendingIds(np.arange(len(going)), sources, draws.ids)
            logits = self._launch(replace(batch, pending=pending))
            asked = going
        return PendingGuesses(sequences, join_draws(drawn) if drawn else None, places)

    def _launch(self, batch: ForwardBatch) -> torch.Tensor:
        """Launch a forward behind the one before, which may still run: there are two plans."""
        self._before_latest.wait()
        try:
            return self._runner.launch(batch)
        finally:  # what fails may have taken its turn of the plans, and have launched work
            self._before_latest, self._latest = self._latest, self._runner.record()

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Launch a forward, and wait until it has run."""
        logits = self._launch(batch)
        self._latest.wait()
        return logits

    def _own_tables(
        self, sequences: Sequence[DraftRequest], page_tables: Sequence[Int32Array]
    ) -> tuple[Int32Array, ...]:
        """The tables of its pools, with every page to be written: -1 would be the pool's last."""
        assert self._page_size, "bind pools first"
        tables = self._runner.own_tables(page_tables)
        assert all(one.new_ids and one.kv_len >= 0 for one in sequences)
        last_pages = np.array([(one.kv_end - 1) // self._page_size for one in sequences])
        for table in tables:
            assert (table[np.arange(len(sequences)), last_pages] >= 0).all()
        return tables

    def _guess(
        self,
        logits: torch.Tensor,
        sequences: Sequence[DraftRequest],
        guesses: Sequence[list[int]],
        asked: Sequence[int],
    ) -> list[int]:
        """Add a guess to each sequence in `asked`; return those that want another."""
        rows = [sequences[index].row_after(guesses[index]) for index in asked]
        going = []
        for index, token_id in zip(asked, _sample_token_ids(logits, rows), strict=True):
            if token_id is not None:
                guesses[index].append(token_id)
                if len(guesses[index]) < sequences[index].count:
                    going.append(index)
        return going


def _new_batch(
    sequences: Sequence[DraftRequest], tables: tuple[Int32Array, ...], asked: Sequence[int]
) -> ForwardBatch:
    """The new tokens of every sequence, with logits of those in `asked`."""
    query_start = np.cumsum([0, *(len(one.new_ids) for one in sequences)])
    return ForwardBatch(
        input_ids=np.concatenate([np.asarray(one.new_ids, np.int64) for one in sequences]),
        positions=np.concatenate(
            [np.arange(one.kv_len, one.row.position, dtype=np.int64) for one in sequences]
        ),
        query_start=query_start.astype(np.int32),
        seq_lens=np.array([one.row.position for one in sequences], np.int32),
        page_tables=tables,
        logit_rows=query_start[1:][asked].astype(np.int64) - 1,
    )


def _one_each_batch(
    token_ids: Sequence[int],
    positions: Sequence[int],
    tables: Sequence[Int32Array],
    going: Sequence[int],
) -> ForwardBatch:
    """One more token of each sequence that goes on."""
    count, places = len(going), np.array(positions, np.int64)
    return ForwardBatch(
        input_ids=np.array(token_ids, np.int64),
        positions=places,
        query_start=np.arange(count + 1, dtype=np.int32),
        seq_lens=(places + 1).astype(np.int32),
        page_tables=tuple(table[going] for table in tables),
        logit_rows=np.arange(count, dtype=np.int64),
    )


def _sample_token_ids(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """A token for each row of logits, sampled on their device or the host; None: it has none."""
    if samples_on(logits.device):
        tokens = sample_on_device(logits, rows, logprobs=False)
        return [one.token_id if isinstance(one, SampledToken) else None for one in tokens]
    raw: Float32Array = logits.cpu().numpy()
    sampled = map(sample_token_id, raw, rows, argmax_rows(raw, rows))
    return [one if isinstance(one, int) else None for one in sampled]
