"""What a worker is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvrelay.engine.faults import Fault
from kvrelay.kv_transfer.checksums import VerifyPages
from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.net.tls import TlsFiles


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


class Speculation(StrEnum):
    """Who guesses the next tokens, so that one forward can verify several."""

    NONE = "none"
    NGRAM = "ngram"
    """The request's own text: what followed the last tokens when they came before."""
    DRAFT = "draft"
    """A smaller model."""


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
    """Plan a step while the one before it computes."""
    debug_retract_every: int = 0
    """Retract a running request every so many decode steps; 0: only when memory is short."""
    growth_min: float = 0.1
    """The smallest part of `max_tokens` that admission leaves room for, measured or not."""
    growth_max: float = 1.0
    """The largest."""
    speculation: Speculation = Speculation.NONE
    """Who drafts tokens for one forward to verify."""
    draft_model_path: Path | None = None
    """The drafting checkpoint, for `Speculation.DRAFT`; of the same vocabulary."""
    num_draft_tokens: int = 4
    """Drafted tokens that a step verifies at most."""
    bypass_limit: int = 16
    """Requests that may be let in before an older one that does not fit."""
    drain_grace: float = 30.0
    """Seconds after which a worker that drains gives back what can go on elsewhere."""
    quarantine_limit: float = 600.0
    """Seconds that memory may be in quarantine until the worker drains; 0: for ever."""
    peer_timeout: float = 15.0
    """Seconds without a word after which a hand-over's other side is given up."""
    faults: tuple[Fault, ...] | None = None
    """What is to go wrong here; None: nothing, ever. With none at first, some can come later."""
    audit_pages: bool = False
    """Check every single page after every step, not the sums alone; for tests and debugging."""
    verify_pages: VerifyPages = VerifyPages.OFF
    """Of the pages that are read from a prefill worker, those whose bytes are compared."""
    min_transfer_gbps: float = 0.0
    """A decode worker does not read from a prefill worker that a probe finds slower."""
    threads: int = 1
    """Threads of one forward on a CPU."""
    host: str = "127.0.0.1"
    grpc_port: int = 0
    """0: any free port."""
    metrics_port: int = 0
    """0: any free port."""
    tls: TlsFiles | None = None
    """Shown to routers and other workers, who must show one of the same authority; None: plain."""

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of one request, at most, that the steps launched at a time generate."""
        return (1 + self.drafts_for(True)) * (2 if self.overlap else 1)

    def drafts_for(self, wanted: bool) -> int:
        """Drafted tokens a step for a request that does, or does not, want any."""
        return self.num_draft_tokens if wanted and self.speculation is not Speculation.NONE else 0


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
