"""Loads a worker's model, its draft model if there is one, and allocates their KV pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvrelay.engine.config import Speculation, WorkerConfig
from kvrelay.engine.executor.drafters import ModelDrafter, NgramDrafter
from kvrelay.engine.executor.grammar_masks import GrammarMasks
from kvrelay.engine.executor.model_executor import Drafter, ModelExecutor, PageCopier
from kvrelay.engine.worker.memory import divide_memory, make_host_pools
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.checkpoint.digest import object_digest
from kvrelay.model_runner.draft_model import DraftModel
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.sampling import device_sampler, sampler
from kvrelay.text.grammar import Grammars, model_vocabulary
from kvrelay.wire.model_digest import ModelDigest


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What computes a worker's steps, ready to run."""

    runner: ModelRunner
    pools: Sequence[KVPool]
    """The model's own, then those of a draft model."""
    host_pools: Sequence[KVPool]
    """For each of them the host's; empty if there is no host tier."""
    executor: ModelExecutor
    max_model_len: int
    """Tokens of a request at most: the model's own limit, or the option's if that is less."""
    digest: ModelDigest
    """Of what was loaded."""
    grammars: Grammars
    """What compiles the grammars of structured outputs."""


def load_model(
    config: WorkerConfig,
    tokenizer_sha256: str = "",
    on_read: Callable[[int], None] = lambda _: None,
) -> LoadedModel:
    """Read the weights, reserve the memory, compile. Takes seconds, or minutes.

    Args:
        config: the worker's.
        tokenizer_sha256: of the tokenizer that was loaded, if there is one: for the digest.
        on_read: called with the size of each tensor that was read, in bytes.

    Raises:
        CheckpointError: a model cannot be served.
        ValueError: an option does not fit; the message begins with its name.
    """
    runner = ModelRunner(
        config.model_path,
        config.dtype,
        config.device,
        config.threads,
        batch_invariant=config.batch_invariant,
        attention=config.attention,
        on_read=on_read,
    )
    draft = _load_draft(config, runner, on_read)
    own = runner.make_geometries(config.page_size, config.page_order)
    drafts = draft.make_geometries(config.page_size, config.page_order) if draft else ()
    geometries = own + drafts
    pools = [
        KVPool(geometry, pages, torch.device(runner.device))
        for geometry, pages in zip(geometries, divide_memory(config, geometries), strict=True)
    ]
    runner.bind(pools[: len(own)])
    runner.warm_up()
    sampler.warm_up()
    device_sampler.warm_up(runner.device, runner.config.vocab_size)
    drafter: Drafter | None = None
    if draft is not None:
        draft.bind(pools[len(own) :])
        draft.warm_up()
        drafter = ModelDrafter(draft)
    elif config.speculation is Speculation.NGRAM:
        drafter = NgramDrafter()
    vocab_size = runner.config.vocab_size
    eos_token_ids = runner.config.eos_token_ids
    grammars = Grammars(model_vocabulary(config.model_path, vocab_size, eos_token_ids))
    masks = GrammarMasks(grammars.prepare, vocab_size)
    executor = ModelExecutor(runner, PageCopier(pools), drafter, masks)
    limit = min(config.max_model_len or runner.max_model_len, runner.max_model_len)
    digest = ModelDigest(
        config=runner.config_digest,
        weights=runner.weights_digest,
        tokenizer=tokenizer_sha256,
        dtype=config.dtype,
        layout=_layout_digest(geometries),
        draft=draft.digest if draft else "",
    )
    host_pools = make_host_pools(config, pools)
    return LoadedModel(runner, pools, host_pools, executor, limit, digest, grammars)


def _layout_digest(geometries: Sequence[KVGeometry]) -> str:
    """The hash of what a token's KV is in each pool, however pages are made of it."""
    return object_digest(
        [replace(one, page_size=1, order=PageOrder.PAGE_FIRST) for one in geometries]
    )


def _load_draft(
    config: WorkerConfig, target: ModelRunner, on_read: Callable[[int], None]
) -> DraftModel | None:
    if config.speculation is not Speculation.DRAFT:
        return None
    if config.draft_model_path is None:
        raise ValueError("draft_model_path: speculation by a draft model needs one")
    draft = DraftModel(
        config.draft_model_path, config.dtype, config.device, config.attention, on_read
    )
    draft.check_vocab(target.config)
    return draft
