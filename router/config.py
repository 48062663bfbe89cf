"""What a router is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.net.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything one router needs to know. Built once, by `deploy`."""

    model_name: str
    """What clients call the model."""
    model_path: Path
    """The checkpoint folder; its tokenizer.json is read."""
    dtype: str
    """The workers' dtype, reported by GetModelInfo."""
    grpc_address: str = "127.0.0.1:50051"
    """Where clients come in; port 0: any free one."""
    metrics_address: str = "127.0.0.1:9400"
    """Where Prometheus reads; port 0: any free one."""
    default_max_tokens: int = 256
    """Of a request that names none; less where less fits."""
    max_live_requests: int = 1024
    """Requests above this are refused with a retry hint."""
    retry_after_ms: int = 500
    """That hint."""
    max_message_bytes: int = 16 << 20
    """Of one message from a client."""
    max_attempts: int = 3
    """How often an output may fail, because a worker is lost, say, until its request does."""
    strict: bool = False
    """A request that would have to be computed again fails instead, unless it was retracted."""
    failover_wait_seconds: float = 60.0
    """How long such a request waits for a worker to go on with."""
    shutdown_grace_seconds: float = 5.0
    """How long `stop` lets live requests go on before it ends them."""
    worker_tls: TlsFiles | None = None
    """Shown to workers, who must show one of the same authority; None: plain text."""
    front_tls: TlsFiles | None = None
    """Shown to clients, who show none; None: plain text."""
    auth_token_file: Path | None = None
    """The tokens, one a line, of which a client must bring one; None: everybody may come."""
