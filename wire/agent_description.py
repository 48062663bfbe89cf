"""The description of a worker's memory, which a peer needs in order to read it."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.wire.model_digest import ModelDigest


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The shape of a pool's pages: `kvrelay.mem_cache.geometry.KVGeometry` in plain types."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """The name of torch's dtype, without ``torch.``."""
    page_size: int
    """Tokens a page."""
    order: str
    """``layer_first`` or ``page_first``."""
    latent: bool = False
    window: int | None = None
    draft: bool = False


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """Where a pool lies in its worker's memory."""

    address: int
    """The address of the pool's first byte."""
    pages: int
    geometry: PoolGeometry


@dataclass(frozen=True, slots=True)
class AgentDescription:
    """All that a puller needs in order to read a worker's pools."""

    incarnation: str
    agent_metadata: bytes
    """NIXL's description of its agent; opaque and untrusted."""
    agent_metadata_sha256: bytes
    device_id: int
    memory_type: str
    """NIXL's name for it: ``DRAM`` or ``VRAM``."""
    pools: tuple[PoolDescription, ...]
    scratch: PoolDescription
    """Pages beside the pools, shaped like the first pool's, for probes of the transport."""
    model: ModelDigest
    """The model that computes the pages' KV."""
    host_pools: tuple[PoolDescription, ...] = ()
    """The host tier's pools in main memory, one for each of `pools`; empty: no such tier."""
