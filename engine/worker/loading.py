"""The loading of a worker's model, and its draft model if it has one, and their KV pools."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvrelay.device.cuda_streams import make_pinning, make_streams, use_device
from kvrelay.device.device_streams import STEPS_IN_FLIGHT, Streams
from kvrelay.engine.config import Speculation, WorkerConfig
from kvrelay.engine.executor.drafters import ModelDrafter, NgramDrafter
from kvrelay.engine.executor.grammar_masks import GrammarMasks
from kvrelay.engine.executor.model_executor import Drafter, ModelExecutor, PageCopier
from kvrelay.engine.worker.device_memory import CudaMemory, DeviceMemory, MemoryUse
from kvrelay.engine.worker.gpu_turns import GpuTurns, taken_before
from kvrelay.engine.worker.memory import check_tiers, divide_memory, make_host_pools, pin_host_pools
from kvrelay.kv_transfer.cuda_memory import outside_expandable_segments
from kvrelay.kv_transfer.scratch_pages import probe_bytes
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pinned_pools import PinnedPools
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.checkpoint.digest import object_digest
from kvrelay.model_runner.config.cuda_graphs import CudaGraphs, GraphOptions, GraphSizes
from kvrelay.model_runner.draft_model import DraftModel, count_dummy_pages
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.model_runner.sampling import device_sampler, sampler
from kvrelay.model_runner.sampling.token_counts import TokenCounts
from kvrelay.model_runner.torch_options import parse_device, wait_for_device
from kvrelay.options.memory_share import MemoryShare
from kvrelay.text.grammar import Grammars, model_vocabulary
from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.worker_info import WorkerRole

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute a worker's steps, with its memory."""

    runner: ModelRunner
    pools: Sequence[KVPool]
    """The model's own pools, then those of a draft model."""
    host_pools: Sequence[KVPool]
    """The host's pool for each of them; empty if there is no host tier."""
    pinned: PinnedPools
    """The host's pools that are pinned for a GPU. Must be closed after its copies have ended."""
    streams: Streams
    """The streams of the model's device."""
    executor: ModelExecutor
    max_model_len: int
    """The most tokens of a request: the model's own limit, or the option's if that is less."""
    digest: ModelDigest
    """The digest of the loaded model."""
    grammars: Grammars
    """The grammars of structured outputs, with their compiler."""


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
    device = parse_device(config.device)
    if device.type == "cpu" or config.gpu_part == 1:
        return _load(config, tokenizer_sha256, on_read)
    gpu = torch.cuda.get_device_properties(device).uuid
    with GpuTurns(str(gpu)).turn():
        return _load(config, tokenizer_sha256, on_read, taken_before(device))


def _load(
    config: WorkerConfig, tokenizer_sha256: str, on_read: Callable[[int], None], others: int = 0
) -> LoadedModel:
    """Load as `load_model`; `others` have taken so many bytes of the device before."""
    use_device(parse_device(config.device))
    runner = ModelRunner(
        config.model_path,
        config.dtype,
        config.device,
        config.threads,
        batch_invariant=config.batch_invariant,
        model_code=config.model_code,
        cpu_kernels=config.cpu_kernels,
        moe_backend=config.moe_backend,
        attention=config.attention,
        attention_splits=config.attention_splits,
        kv_dtype=config.kv_dtype,
        graphs=graph_options(config),
        on_read=on_read,
    )
    draft = _load_draft(config, runner, on_read)
    own = runner.make_geometries(config.page_size, config.page_order)
    drafts = draft.make_geometries(config.page_size, config.page_order) if draft else ()
    geometries = own + drafts
    check_tiers(config, geometries)
    memory = CudaMemory(runner.device) if runner.device.type == "cuda" else None
    # Before what is left for KV is measured.
    counts = make_counts(config, runner)
    sized = replace(config, kv_memory=find_kv_memory(config, runner, draft, memory, others))
    reserved = count_dummy_pages(runner, draft)
    totals = divide_memory(sized, geometries, reserved)
    with outside_expandable_segments():
        pools = [
            KVPool(geometry, pages, torch.device(runner.device), reserved)
            for geometry, pages in zip(geometries, totals, strict=True)
        ]
    runner.bind(pools[: len(own)])
    runner.warm_up(rows_first=config.role is WorkerRole.DECODE)
    runner.capture_graphs()
    sampler.warm_up()
    device_sampler.warm_up(runner.device, runner.config.vocab_size)
    drafter: Drafter | None = None
    if draft is not None:
        draft.bind(pools[len(own) :])
        draft.warm_up()
        draft.capture_graphs()
        drafter = ModelDrafter(draft)
    elif config.speculation is Speculation.NGRAM:
        drafter = NgramDrafter()
    vocab_size = runner.config.vocab_size
    eos_token_ids = runner.config.eos_token_ids
    grammars = Grammars(model_vocabulary(config.model_path, vocab_size, eos_token_ids))
    masks = GrammarMasks(grammars, vocab_size)
    streams = make_streams(runner.device)
    draw = None if counts is None else partial(device_sampler.launch, counts=counts.entries)
    score = None if counts is None else device_sampler.launch_scores
    copy = PageCopier(pools)
    executor = ModelExecutor(runner, copy, drafter, masks, streams, draw, counts, score)
    limit = min(config.max_model_len or runner.max_model_len, runner.max_model_len)
    digest = ModelDigest(
        config=runner.config_digest,
        weights=runner.weights_digest,
        tokenizer=tokenizer_sha256,
        dtype=config.dtype,
        layout=_layout_digest(geometries),
        draft=draft.digest if draft else "",
        arithmetic=runner.arithmetic,
    )
    host_pools = make_host_pools(config, pools)
    return LoadedModel(
        runner,
        pools,
        host_pools,
        # Before NIXL registers them.
        pin_host_pools(host_pools, make_pinning(runner.device)),
        streams,
        executor,
        limit,
        digest,
        grammars,
    )


def make_counts(config: WorkerConfig, runner: ModelRunner) -> TokenCounts | None:
    """Make the table in which the device counts tokens for penalties; None: it does not sample."""
    if not device_sampler.samples_on(runner.device):
        return None
    vocab_size = runner.config.vocab_size
    return TokenCounts.for_requests(config.max_running, vocab_size, runner.device)


def find_kv_memory(
    config: WorkerConfig,
    runner: ModelRunner,
    draft: DraftModel | None,
    memory: DeviceMemory | None,
    others: int = 0,
) -> int:
    """Compute the bytes of KV: those of the option, or what is left of the device's `memory`.

    Workers that share the device divide ``auto`` as they divide the device. `others` have taken so
    many bytes of it before this worker took any.

    Raises:
        ValueError: nothing is left, or the device is a CPU; the message begins with the option.
    """
    if isinstance(config.kv_memory, int):
        return config.kv_memory
    if memory is None:
        raise ValueError(
            f"kv_memory: {config.kv_memory} is a share of a GPU's memory; for a CPU tell bytes"
        )
    share = config.kv_memory
    if share.is_auto:
        share = MemoryShare(share.part * config.gpu_part)
    use = MemoryUse.measure(memory, partial(_run_largest_step, config, runner, draft), others)
    scratch = max(model.scratch_part for model in (runner, draft) if model is not None)
    left = use.left_for_kv(share, scratch, _transfer_bytes(config, runner))
    logger.info("%d MiB of KV are left: %s", left >> 20, use)
    return left


def _transfer_bytes(config: WorkerConfig, runner: ModelRunner) -> int:
    """Estimate the device memory that the transfer agent will allocate, once there are pools."""
    if config.role is WorkerRole.AGGREGATED:
        return 0  # it has none
    return probe_bytes(runner.make_geometries(config.page_size, config.page_order)[0])


def _run_largest_step(
    config: WorkerConfig, runner: ModelRunner, draft: DraftModel | None
) -> Sequence[object]:
    """Compute and sample a step that takes as much memory as any.

    Returns:
        CUDA graphs like those that there will be over the pools: they take memory beside any step.
    """
    graphs = [model.capture_on_scratch() for model in (runner, draft) if model is not None]
    longest = min(config.max_model_len or runner.max_model_len, runner.max_model_len)
    if draft is not None:
        draft.run_largest(config.chunk_tokens, config.max_running, longest)
    rows = config.max_running * (1 + config.drafts_for(True))
    samples_there = device_sampler.samples_on(runner.device)
    # Where the host scores prompts a step's logits stay until they are there, while the next runs.
    in_flight: deque[torch.Tensor] = deque(maxlen=STEPS_IN_FLIGHT)
    for context in runner.largest_contexts(longest):
        if samples_there:
            in_flight.clear()
        in_flight.append(runner.run_largest(config.chunk_tokens, rows, context))
    if samples_there:
        device_sampler.run_largest(in_flight[-1][:rows])
    wait_for_device(runner.device)
    return graphs


def _layout_digest(geometries: Sequence[KVGeometry]) -> str:
    """Hash the layout of a token's KV in each pool, however pages are made of it."""
    return object_digest(
        [replace(one, page_size=1, order=PageOrder.PAGE_FIRST) for one in geometries]
    )


def graph_options(config: WorkerConfig) -> GraphOptions | None:
    """Find the CUDA graphs to capture; None: none. Raises ValueError, as `load_model`."""
    required = config.cuda_graphs is CudaGraphs.DECODE
    if not required:
        on_gpu = parse_device(config.device).type == "cuda"
        if config.cuda_graphs is CudaGraphs.OFF or not on_gpu:
            return None
    most_each = 1 + config.drafts_for(True)
    return GraphOptions(_graph_sizes(config), config.page_size, required, most_each)


def draft_graph_options(config: WorkerConfig) -> GraphOptions | None:
    """Find the same for a draft model, which lacks a second token where all guesses were kept."""
    options = graph_options(config)
    return None if options is None else replace(options, most_each=2)


def _graph_sizes(config: WorkerConfig) -> GraphSizes:
    if config.cuda_graph_sizes is None:
        return GraphSizes.up_to(config.max_running)
    try:
        return GraphSizes.parse(config.cuda_graph_sizes).below(config.max_running)
    except ValueError as error:
        raise ValueError(f"cuda_graph_sizes: {error}") from None


def _load_draft(
    config: WorkerConfig, target: ModelRunner, on_read: Callable[[int], None]
) -> DraftModel | None:
    if config.speculation is not Speculation.DRAFT:
        return None
    if config.draft_model_path is None:
        raise ValueError("draft_model_path: speculation by a draft model needs one")
    draft = DraftModel(
        config.draft_model_path,
        config.dtype,
        config.device,
        config.attention,
        config.kv_dtype,
        draft_graph_options(config),
        attention_splits=config.attention_splits,
        model_code=config.model_code,
        on_read=on_read,
        kernel_threads=target.kernel_threads,
        moe_backend=config.moe_backend,
    )
    draft.check_vocab(target.config)
    return draft
