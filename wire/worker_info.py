"""What a worker is, as every process of the cluster sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.wire.model_digest import ModelDigest


class WorkerRole(StrEnum):
    """What a worker does with a request."""

    PREFILL = "prefill"
    """Computes prompts and hands their KV over."""
    DECODE = "decode"
    """Takes KV over and generates."""
    AGGREGATED = "aggregated"
    """Both, in one worker: the baseline."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One incarnation of a worker: what it is, where to reach it, what it can take.

    A worker says this of itself when it has started; `deploy` lists it for the routers.
    """

    name: str
    """Stable over restarts, e.g. ``decode-0``."""
    role: WorkerRole
    incarnation: str
    """Fresh at every start: a restarted worker is another one."""
    address: str
    """``host:port`` of its gRPC services."""
    metrics_address: str
    """``host:port`` of its Prometheus metrics."""
    pool_tokens: int
    """Tokens that one request can hold there at most."""
    max_model_len: int
    """Tokens, prompt and output together."""
    vocab_size: int
    architecture: str
    eos_token_ids: tuple[int, ...]
    model: ModelDigest
    """What the incarnation has loaded."""
    version: str
    """Of kvrelay; routers of another version send it nothing."""
    kv_events_address: str = ""
    """``host:port`` where it publishes KV events; empty if it does not."""
    pid: int = 0
    """Of its process, on its own machine; 0 where nobody has to know it."""
    draining: bool = False
    """It gets no more requests; those that nobody else can take wait for its successor.

    It is listed, alive or not, until that one is there.
    """
    locality: str = ""
    """Workers of the same one are near each other (``--near``); empty: that is not known."""


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where one incarnation of a worker is reached."""

    address: str
    """``host:port`` of its gRPC services."""
    incarnation: str
