"""A worker's description of its pools, which lets peers read them, and its check."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from kvrelay.kv_transfer.byte_runs import PoolLayout
from kvrelay.kv_transfer.errors import PeerRefusedError
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.wire.agent_description import AgentDescription, PoolDescription, PoolGeometry
from kvrelay.wire.model_digest import ModelDigest

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
    )
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """The description of a worker's pools that a puller needs in order to read them.

    The metadata are NIXL's opaque bytes. They are untrusted: a flipped byte in them can crash the
    process that loads them. So a digest travels with them and is checked first.
    """

    incarnation: str
    metadata: bytes
    metadata_sha256: bytes
    layouts: tuple[PoolLayout, ...]
    """The layout of each pool."""
    scratch: PoolLayout
    """The pages to probe the transport with."""
    model: ModelDigest
    """The digest of the model that computes the pages' KV."""
    host_layouts: tuple[PoolLayout, ...] = ()
    """The layout of each pool's host pool, if there is a host tier that may be read."""

    @classmethod
    def read(cls, plain: AgentDescription) -> PeerDescription:
        """Read a peer's description of itself; only its form is checked.

        Raises:
            PeerRefusedError: a value is out of range.
        """
        device = (plain.device_id, plain.memory_type)
        try:
            *layouts, scratch = (_layout(pool, *device) for pool in (*plain.pools, plain.scratch))
            host = tuple(_layout(pool, 0, "DRAM") for pool in plain.host_pools)
        except (KeyError, ValueError) as error:
            raise PeerRefusedError(f"geometry of {plain.incarnation}: {error}") from error
        return cls(
            plain.incarnation,
            plain.agent_metadata,
            plain.agent_metadata_sha256,
            tuple(layouts),
            scratch,
            plain.model,
            host,
        )

    def plain(self) -> AgentDescription:
        """Convert to plain types, for other processes."""
        return AgentDescription(
            incarnation=self.incarnation,
            agent_metadata=self.metadata,
            agent_metadata_sha256=self.metadata_sha256,
            device_id=self.scratch.device_id,
            memory_type=self.scratch.memory_type,
            pools=tuple(map(_plain_pool, self.layouts)),
            scratch=_plain_pool(self.scratch),
            model=self.model,
            host_pools=tuple(map(_plain_pool, self.host_layouts)),
        )

    def check(self, incarnation: str, own: Sequence[PoolLayout], model: ModelDigest) -> None:
        """Check a description that came from a peer, before NIXL loads its bytes.

        Args:
            incarnation: the worker that was asked for the description.
            own: the pools that its pages will be read into.
            model: the model that will compute with them.

        Raises:
            PeerRefusedError: it is another worker's, its bytes were changed, its model is another,
                or its pages do not fit.
        """
        if self.incarnation != incarnation:
            raise PeerRefusedError(f"expected worker {incarnation}, found {self.incarnation}")
        if hashlib.sha256(self.metadata).digest() != self.metadata_sha256:
            raise PeerRefusedError(f"agent metadata of {incarnation} does not match its digest")
        if difference := self.model.difference_from(model):
            raise PeerRefusedError(
                f"{incarnation} has loaded model {self.model.name}, not {model.name} as this "
                f"worker has: {difference}"
            )
        if not self.layouts or self.scratch.geometry != self.layouts[0].geometry:
            raise PeerRefusedError(f"scratch pages of {incarnation} are not like its pool's")
        _check_fit(incarnation, own, self.layouts)
        if self.host_layouts:
            _check_fit(f"the host of {incarnation}", own, self.host_layouts)


def _check_fit(whose: str, own: Sequence[PoolLayout], other: Sequence[PoolLayout]) -> None:
    mine, theirs = ([pool.geometry for pool in pools] for pools in (own, other))
    if len(mine) != len(theirs) or not all(map(KVGeometry.holds_same_tokens_as, mine, theirs)):
        raise PeerRefusedError(f"pages of {whose} ({theirs}) do not fit {mine}")


def _layout(pool: PoolDescription, device_id: int, memory_type: str) -> PoolLayout:
    return PoolLayout(_geometry(pool.geometry), pool.pages, pool.address, device_id, memory_type)


def _plain_pool(pool: PoolLayout) -> PoolDescription:
    geometry = {field.name: getattr(pool.geometry, field.name) for field in fields(PoolGeometry)}
    geometry |= {"dtype": _DTYPE_NAMES[pool.geometry.dtype], "order": pool.geometry.order.value}
    return PoolDescription(pool.address, pool.total_pages, PoolGeometry(**geometry))


def _geometry(plain: PoolGeometry) -> KVGeometry:
    geometry = {field.name: getattr(plain, field.name) for field in fields(PoolGeometry)}
    geometry |= {"dtype": _DTYPES[plain.dtype], "order": PageOrder(plain.order)}
    return KVGeometry(**geometry)
