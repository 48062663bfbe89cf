"""What a worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvrelay.mem_cache.geometry import PageOrder


class PrefixIndexKind(StrEnum):
    """How a worker finds prefixes that it has computed, or taken over, before."""

    RADIX = "radix"
    """In a radix tree over whole pages."""
    NONE = "none"
    """Not at all: every request's pages are freed at its end."""


class Role(StrEnum):
    """What a worker does with a request."""

    PREFILL = "prefill"
    """Computes prompts and hands their KV over."""
    DECODE = "decode"
    """Takes KV over and generates."""
    AGGREGATED = "aggregated"
    """Both, in one worker: the baseline."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything one worker needs to know. Built once, by `deploy`."""

    name: str
    """Stable over restarts, e.g. ``decode-0``."""
    role: Role
    model_path: Path
    """A checkpoint folder: config.json, safetensors, tokenizer.json."""
    model_name: str
    dtype: str = "bfloat16"
    device: str = "cpu"
    page_size: int = 16
    kv_memory: int = 512 << 20
    """Bytes of the paged pool."""
    page_order: PageOrder = PageOrder.PAGE_FIRST
    prefix_index: PrefixIndexKind = PrefixIndexKind.RADIX
    max_running: int = 64
    """Rows: requests that hold memory at the same time."""
    chunk_tokens: int = 512
    """Prompt tokens that one prefill step computes at most."""
    max_model_len: int | None = None
    """Caps the model's own context length."""
    overlap: bool = True
    """Plan a step while the one before computes."""
    growth_min: float = 0.1
    """Of a request's `max_tokens`, the part that admission reserves for growth at least."""
    growth_max: float = 1.0
    """And at most."""
    bypass_limit: int = 16
    """Requests that may pass one that does not fit, before none may."""
    speculation: str = "none"
    """Who drafts tokens that a step then verifies: ``none``, ``ngram`` or ``draft``."""
    draft_model_path: Path | None = None
    """The checkpoint folder of the model that drafts, where one does."""
    num_draft_tokens: int = 4
    """Tokens in a draft at most."""
    debug_retract_every: int = 0
    """Retract a request every so many steps, for tests; 0: only when memory is short."""
    audit_pages: bool = False
    """Check every single page after every step, not the sums alone; for tests and debugging."""
    threads: int = 1
    """Threads of one forward on a CPU."""
    host: str = "127.0.0.1"
    grpc_port: int = 0
    """0: any free port."""
    metrics_port: int = 0
    """0: any free port."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a started worker says of itself."""

    name: str
    role: Role
    incarnation: str
    """Fresh at every start: a restarted worker is another one."""
    address: str
    metrics_address: str
    pool_tokens: int
    """Tokens that one request can hold there at most."""
    max_model_len: int
    vocab_size: int
    architecture: str
    eos_token_ids: tuple[int, ...]
    pid: int
