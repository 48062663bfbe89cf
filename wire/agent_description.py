"""What a worker tells those who want to read its memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.wire.model_digest import ModelDigest


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """What a pool's pages look like; `kvrelay.mem_cache.geometry.KVGeometry` in plain types."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """torch's name, without ``torch.``."""
    page_size: int
    """Tokens."""
    order: str
    """``layer_first`` or ``page_first``."""
    latent: bool = False
    window: int | None = None
    draft: bool = False


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """Where a pool lies in its worker's memory."""

    address: int
    """Of its first byte."""
    pages: int
    geometry: PoolGeometry


@dataclass(frozen=True, slots=True)
class AgentDescription:
    """All that a puller needs in order to read a worker's pools."""

    incarnation: str
    agent_metadata: bytes
    """NIXL's; opaque and untrusted."""
    agent_metadata_sha256: bytes
    device_id: int
    memory_type: str
    """NIXL's: ``DRAM`` or ``VRAM``."""
    pools: tuple[PoolDescription, ...]
    scratch: PoolDescription
    """Pages beside the pools, like the first one's, to probe the transport with."""
    model: ModelDigest
    """What computes the pages' KV."""
    host_pools: tuple[PoolDescription, ...] = ()
    """The host tier's, one for each of `pools`, in main memory; none: there is no such tier."""
