"""Everything that a worker is configured with when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kvrelay.engine.faults import Fault
from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.model_runner.attention.attention_choice import AttentionChoice, AttentionSplits
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.model_runner.config.cuda_graphs import CudaGraphs, GraphSizes
from kvrelay.model_runner.config.model_code import ModelCode
from kvrelay.model_runner.config.moe_backend import MoEBackend
from kvrelay.net.tls import TlsFiles
from kvrelay.options.declaration import Section, option
from kvrelay.options.memory_share import MemoryShare
from kvrelay.options.observing import ObservingOptions
from kvrelay.pacing.chunk_size import LatencyTargets
from kvrelay.wire.worker_info import WorkerRole


class PrefixIndexKind(StrEnum):
    """The way in which a worker finds prefixes that it has computed, or taken over, before."""

    RADIX = "radix"
    """It finds them in a radix tree over whole pages."""
    NONE = "none"
    """It finds none: every request's pages are freed at its end."""


class Speculation(StrEnum):
    """The source of guessed next tokens, several of which one forward can verify."""

    NONE = "none"
    NGRAM = "ngram"
    """The request's own text: what followed the last tokens when they came before."""
    DRAFT = "draft"
    """A smaller model."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(ObservingOptions):
    """The options of `kvrelay serve` that each worker is told as they are."""

    dtype: str = option(
        "bfloat16",
        "The type of weights, activations and KV. Weights that a checkpoint has in FP8 stay so on "
        "a GPU with bfloat16, and become this type elsewhere; so do weights in fewer bits.",
        Section.MODEL,
        choices=("bfloat16", "float16", "float32"),
    )
    model_code: ModelCode = option(
        ModelCode.AUTO,
        "Whose code computes the model, and the draft model: native, ours; transformers, any "
        "causal language model of that package which proves itself at the start; auto, ours where "
        "it knows the architecture. transformers has no --batch-invariant, no 8-bit KV, no "
        "weights in 8 bits and no CUDA graphs.",
        Section.MODEL,
    )
    batch_invariant: bool = option(
        False,
        "Compute a token to the same bits whatever requests are beside it and in whatever chunks, "
        "so that a stream that fails over goes on exactly as it would have. For bfloat16 and "
        "float32 on a CPU.",
        Section.MODEL,
    )
    prompt_threads: int | None = option(
        None,
        "CPU threads that a worker computes prompts with, and steps of many requests, while other "
        "workers of its machine compute nothing: beside its own (--threads) as many as those have, "
        "up to this number. "
        "One that is not above --threads turns it off. Only where more threads compute the same "
        "bits: with bfloat16, where our kernels multiply (--cpu-kernels), and with "
        "--batch-invariant.",
        Section.WORKERS,
        at_least=1,
        shown_default="as many as there are cores",
    )
    cpu_kernels: str = option(
        "auto",
        "What multiplies bfloat16 on a CPU: own, our kernels, or onednn. auto times both on this "
        "machine, once for each shape of weights, and takes the faster. --batch-invariant and "
        "float32 do not ask: there the way follows from the processor alone. Weights of 4 bits or "
        "fewer are timed as they are, too; packed keeps them so, in a quarter of the memory, "
        "and is own for others.",
        Section.MODEL,
        choices=("auto", "own", "onednn", "packed"),
    )
    attention: AttentionChoice = option(
        AttentionChoice.AUTO,
        "What computes attention: FlashInfer on a GPU (it has to be installed), our own kernels on "
        "a CPU, or plain torch, which is slow. auto takes the fastest that can compute the model.",
        Section.MODEL,
    )
    attention_splits: AttentionSplits = option(
        AttentionSplits.BATCH,
        "How FlashInfer divides the KV of a long sequence among the GPU: batch, by what else is "
        "computed, or none: not at all, so that a result's last bits depend less on other "
        "requests, which is slower for few long sequences. Not for latents (MLA).",
        Section.MODEL,
    )
    moe_backend: MoEBackend = option(
        MoEBackend.AUTO,
        "What computes the experts of a layer: our own kernel on a CPU, torch's grouped products, "
        "or FlashInfer's kernel on a GPU (it has to be installed, and compiles for minutes when it "
        "is first used). auto takes our own where the processor has it, and torch elsewhere.",
        Section.MODEL,
    )
    cuda_graphs: CudaGraphs = option(
        CudaGraphs.AUTO,
        "Which steps a GPU is given as one CUDA graph: decode those in which each request "
        "generates one token, or verifies drafts, auto the same where they can be captured, or "
        "none, with a line in the log. For --attention flashinfer. Experts have graphs on sm_90 "
        "and sm_100 in bfloat16, or by --moe-backend flashinfer.",
        Section.MODEL,
    )
    cuda_graph_sizes: str | None = option(
        None,
        "The numbers of requests that graphs are captured for, with commas between them; a step "
        "takes the next larger one, and a step of more requests none. Sizes that --max-running "
        "never needs are left out. With --speculation there is a second graph for each size, up to "
        "512 tokens. Each graph takes 8 MiB for each pool beside the KV memory, and a second or so "
        "at the start.",
        Section.MODEL,
        check=GraphSizes.parse,
        metavar="N,N,...",
        shown_default="1, 2, 4, by 8 to 256 and by 16 to 512, as far as --max-running needs",
    )
    kv_dtype: KVDtype = option(
        KVDtype.AUTO,
        "The type of KV in pages: auto is --dtype; fp8_e4m3 takes half of bfloat16's memory and "
        "half of its transfers, and rounds, by the checkpoint's scales of keys and values where it "
        "has any. On a CPU steps take longer for it.",
        Section.MEMORY,
    )
    max_model_len: int | None = option(
        None,
        "Limits prompt and output together, in tokens.",
        Section.MODEL,
        at_least=1,
        shown_default="the model's own limit",
    )
    kv_memory: int | MemoryShare | None = option(
        None,
        "KV memory of each worker, in bytes or like 512MiB or 2GiB. On a GPU also the share of its "
        "memory that the worker may take with all it needs, like 0.85 or 85%: KV gets what weights "
        "and the largest step leave, as measured at the start. auto: 90%, divided among workers "
        "that share a GPU.",
        Section.MEMORY,
        at_least=1,
        unit="bytes",
        or_share=True,
        shown_default="512MiB; auto on a GPU",
    )
    host_kv_memory: int = option(
        0,
        "Host memory of each worker below its KV memory, in bytes or like 2GiB: what the prefix "
        "index evicts, or a retracted request leaves, is kept there and comes back where that is "
        "faster than to compute it. 0: none.",
        Section.MEMORY,
        at_least=0,
        unit="bytes",
    )
    kv_storage: str = option(
        "",
        "A folder, which workers on this machine or others may share, that keeps KV below the host "
        "memory of --host-kv-memory: what is asked for again, or may be evicted, is written there, "
        "and any worker reads it where that is faster than to compute it. It outlives workers. "
        "Whoever reads the folder reads what prompts have left there. Or mooncake://HOST:PORT, the "
        "master of a Mooncake Store, which keeps it in the memory of many machines. Not for models "
        "with sliding windows. Empty: none.",
        Section.MEMORY,
        metavar="FOLDER|URL",
    )
    kv_storage_size: int = option(
        16 << 30,
        "What each worker may write to --kv-storage at most, in bytes or like 100GiB; then it "
        "evicts what was used longest ago. With Mooncake it is the memory that each worker lends.",
        Section.MEMORY,
        at_least=1,
        unit="bytes",
    )
    page_size: int = option(16, "Tokens in a page of KV.", Section.MEMORY, at_least=1)
    page_order: PageOrder = option(
        PageOrder.PAGE_FIRST,
        "How a pool lies in memory: page_first keeps all layers of a page together, layer_first "
        "all pages of a layer.",
        Section.MEMORY,
    )
    prefix_index: PrefixIndexKind = option(
        PrefixIndexKind.RADIX,
        "How a worker finds the KV of prefixes that it has computed before: radix keeps it in a "
        "radix tree, none frees it when its request ends.",
        Section.MEMORY,
    )
    retention_share: float = option(
        0.5,
        "The part of a worker's KV that requests may have retained (`retain_seconds`): other "
        "cached KV is evicted first. Tenants that retain something have equal parts of it. Nothing "
        "is pinned: what is retained makes room, too, before a request has to wait. 0: nothing is "
        "retained.",
        Section.MEMORY,
        at_least=0,
        at_most=1,
    )
    kv_events: bool = option(
        False,
        "Each worker publishes which pages its prefix index stores and removes, in vLLM's form "
        "over ZeroMQ, on a port of its own on loopback. `kvrelay status --json` shows it, if there "
        "are tokens only to the right admin. Prompts are in it: whoever reaches the port reads "
        "those of all tenants.",
        Section.MEMORY,
    )
    growth_min: float = option(
        0.1,
        "The smallest part of a request's max_tokens that admission reserves for its output; "
        "between this and --growth-max the part follows the lengths of earlier outputs.",
        Section.MEMORY,
        at_least=0,
        at_most=1,
    )
    growth_max: float = option(1.0, "The largest such part.", Section.MEMORY, at_least=0, at_most=1)
    max_running: int | None = option(
        None,
        "The most requests that hold memory on a worker at the same time.",
        Section.REQUESTS,
        at_least=1,
        shown_default="64; 256 on a GPU",
    )
    chunk_tokens: int | None = option(
        None,
        "The most prompt tokens that one step computes.",
        Section.REQUESTS,
        at_least=1,
        shown_default="512; on a GPU 2048, 4096 from 64 GiB of it a worker on, 8192 from 128 GiB",
    )
    itl_target: float | None = option(
        None,
        "The milliseconds that a step may take which computes prompts beside requests that "
        "generate: the chunk beside them shrinks to keep it, by the speed that the worker has "
        "learnt. A step computes some prompt tokens in any case.",
        Section.REQUESTS,
        more_than=0,
        unit="milliseconds",
        shown_default="2.5 times a step of one request, up to 16 times if many tokens wait or, "
        "on an aggregated worker, few requests generate, there six times one of many that "
        "do, up to 24 times, "
        "and at least 1.5 times one of those that generate now; up to a twelfth of what the "
        "oldest prompt has waited, or what --ttft-target wants",
    )
    ttft_target: float | None = option(
        None,
        "The milliseconds in which a request is to have its first token, as its client sees it. "
        "Steps beside requests that generate are as long as that takes: at most an eighth of it, "
        "or of what a late prompt has waited. --itl-target bounds them first. A prefill worker "
        "computes whole chunks in any case.",
        Section.REQUESTS,
        more_than=0,
        unit="milliseconds",
        shown_default="none: a step may take a twelfth of what the oldest prompt has waited",
    )
    bypass_limit: int = option(
        16,
        "The most requests that are admitted before an older one that does not fit into memory.",
        Section.REQUESTS,
        at_least=0,
    )
    grants_ahead: int = option(
        8,
        "The most prompts that a decode worker holds memory for before a prefill worker begins to "
        "compute them; prefill workers take turns.",
        Section.REQUESTS,
        at_least=1,
    )
    prefix_wait: float = option(
        5.0,
        "A request whose prefix another one computes, or reads, waits for that one; but no longer "
        "than so many seconds in which that one makes no progress. 0: no request waits.",
        Section.REQUESTS,
        at_least=0,
        unit="seconds",
    )
    overlap: bool = option(
        True,
        "Plan a step while the one before it computes; the tokens are the same either way.",
        Section.REQUESTS,
    )
    speculation: Speculation = option(
        Speculation.NONE,
        "Who guesses the next tokens, so that one step verifies several: ngram looks them up in "
        "the request's own text, draft asks --draft-model. The tokens are the same either way.",
        Section.SPECULATION,
    )
    num_draft_tokens: int = option(
        4, "The most tokens that are guessed for one step.", Section.SPECULATION, at_least=1
    )
    verify_pages: VerifyPages = option(
        VerifyPages.OFF,
        "Which pages a decode worker compares by checksum after it has read them: off none, "
        "sample some of each request's, all every one. A request with a page that differs is "
        "computed again.",
        Section.TRANSFER,
    )
    min_transfer_gigabytes_per_second: float = option(
        0.0,
        "A decode worker refuses a prefill worker whose pages it reads more slowly than this, in "
        "10^9 bytes a second; it measures that when the two connect.",
        Section.TRANSFER,
        at_least=0,
        unit="GB/s",
    )
    worker_timeout: float = option(
        15.0,
        "Seconds without an answer after which a worker is killed and replaced, and after which "
        "another worker gives up its transfers with it.",
        Section.RECOVERY,
        more_than=0,
        unit="seconds",
    )
    worker_lease: float | None = option(
        None,
        "Seconds that a worker goes on without a word from its controller; then it ends itself. "
        "Where nobody sees its process end, its death is believed after that time. A longer outage "
        "of the controller ends all workers.",
        Section.RECOVERY,
        more_than=0,
        unit="seconds",
        shown_default="60, or four times --worker-timeout if that is more",
    )
    failed_forwards_limit: int = option(
        3,
        "A worker is replaced when so many forwards in a row have failed; an error that breaks "
        "its device ends it at once. Its requests go on elsewhere.",
        Section.RECOVERY,
        at_least=1,
    )
    step_timeout: float = option(
        60.0,
        "A worker whose forward has not ended after so many seconds, and "
        "--step-timeout-per-token for each of its tokens, is replaced: it hangs. So is one that "
        "does not end a checksum of pages, or a call of NIXL.",
        Section.RECOVERY,
        more_than=0,
        unit="seconds",
    )
    step_timeout_per_token: float = option(
        0.5,
        "Seconds that a forward may take longer for each of its tokens. More is needed where a "
        "CPU computes a large model or long contexts.",
        Section.RECOVERY,
        at_least=0,
        unit="seconds",
    )
    start_timeout: float = option(
        300.0,
        "Seconds that a worker may take to start, beside one second for each 50 MB of weights; "
        "where n workers share a GPU, n times that. After that the cluster does not start; a "
        "worker that restarts is killed and started again.",
        Section.RECOVERY,
        more_than=0,
        unit="seconds",
    )
    drain_grace: float = option(
        30.0,
        "Seconds that requests may still run on a worker that drains; after that they are moved "
        "to other workers.",
        Section.RECOVERY,
        at_least=0,
        unit="seconds",
    )
    quarantine_limit: float = option(
        600.0,
        "Seconds that memory may stay in quarantine; after that its worker drains and restarts, "
        "few workers of a role at a time. 0: for ever.",
        Section.RECOVERY,
        at_least=0,
        unit="seconds",
    )
    debug_retract_every: int = option(
        0,
        "Retract a running request every so many steps; 0: only when memory is short.",
        Section.DEBUGGING,
        at_least=0,
    )
    audit_pages: bool = option(
        False,
        "Check every page after every step, not only the sums over all pages. This is slow.",
        Section.DEBUGGING,
    )

    @property
    def latency_targets(self) -> LatencyTargets:
        """The latencies that chunks of prompts are to keep."""
        return LatencyTargets(
            self.itl_target and self.itl_target / 1000, self.ttft_target and self.ttft_target / 1000
        )


DEVICE_OPTIONS: Final = ("kv_memory", "max_running", "chunk_tokens")
"""The options whose defaults depend on the device."""


@dataclass(frozen=True)
class WorkerConfig(WorkerOptions):
    """Everything one worker needs to know. Built once, by `deploy`."""

    kv_memory: int | MemoryShare = field(default=512 << 20, kw_only=True)
    max_running: int = field(default=64, kw_only=True)
    chunk_tokens: int = field(default=512, kw_only=True)
    left_to_device: frozenset[str] = field(default=frozenset(), kw_only=True)
    """The names of `DEVICE_OPTIONS` that nobody gave. The values here are a CPU's; a GPU has others
    (`engine/worker/device_defaults.py`)."""
    gpu_part: float = field(default=1.0, kw_only=True)
    """The part of a GPU that the worker has; the others that share it have the rest."""

    name: str
    """Stable over restarts, e.g. ``decode-0``."""
    role: WorkerRole
    model_path: Path
    """A checkpoint folder: config.json, safetensors, tokenizer.json."""
    model_name: str
    model_files: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of the checkpoint's files, by name, if the worker's node is to get a copy."""
    draft_model_files: Mapping[str, str] = field(default_factory=dict)
    """The same for the draft model's checkpoint."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    computes_prompts: bool = True
    """Whether a decode worker computes prompts; workers of the other roles always do."""
    threads: int = 1
    """Threads of one forward on a CPU."""
    draft_model_path: Path | None = None
    """The drafting checkpoint, for `Speculation.DRAFT`; of the same vocabulary."""
    faults: tuple[Fault, ...] | None = None
    """The faults to inject; None: none, ever. With an empty tuple, some can be armed later."""
    black_box: Path | None = None
    """A file on this machine where one process of the worker finds what killed the one before."""
    host: str = "127.0.0.1"
    """The address where the worker listens and others reach it; empty until it is on its node."""
    metrics_host: str = "127.0.0.1"
    """The address where its metrics are served; empty: the same as `host`."""
    advertised: Mapping[str, str] = field(default_factory=dict)
    """The `host` by the node's address or name, if `host` is empty; other nodes use their
    address."""
    near: str = ""
    """The label of nodes whose value becomes `locality`; empty: none."""
    locality: str = ""
    """The locality shared with nearby workers; empty until the worker is on its node."""
    suspended_alone: bool = False
    """Whether its machine may be suspended while its controller's is not."""
    grpc_port: int = 0
    """The port of its gRPC server; 0: any free port."""
    metrics_port: int = 0
    """The port of its metrics server; 0: any free port."""
    tls: TlsFiles | None = None
    """The certificate shown to routers and workers, who must show one of the same authority; None:
    no TLS."""

    def step_bound_seconds(self, tokens: int) -> float:
        """Seconds after which a forward of so many tokens is taken to hang."""
        return self.step_timeout + tokens * self.step_timeout_per_token

    def with_options(self, values: Mapping[str, Any]) -> WorkerConfig:
        """The same with other values of options, by name.

        One of `DEVICE_OPTIONS` that is None is left to the device, and has a CPU's default here.
        """
        defaults = {one.name: one.default for one in fields(self) if one.name in DEVICE_OPTIONS}
        unset = {name: defaults[name] for name in defaults if values.get(name, ...) is None}
        left = (self.left_to_device - values.keys()) | unset.keys()
        return replace(self, **{**values, **unset}, left_to_device=left)

    @property
    def lease_seconds(self) -> float:
        """Seconds that the worker goes on without a word from its controller."""
        return self.worker_lease or max(60.0, 4 * self.worker_timeout)

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of one request, at most, that the steps launched at a time generate."""
        return (1 + self.drafts_for(True)) * (2 if self.overlap else 1)

    def drafts_for(self, wanted: bool) -> int:
        """Drafted tokens a step for a request that does, or does not, want any."""
        return self.num_draft_tokens if wanted and self.speculation is not Speculation.NONE else 0
