"""The only code that calls NIXL: memory to read and write, and transfers.

All calls but the constructor's come from one thread, that of the `TransferAgent`. NIXL has no
progress thread of its own here, because it would spin a core even when idle. (Its delay is fixed at
0 in the Python package.)
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from kvrelay.kv_transfer.byte_runs import PoolLayout, SpanPairs
from kvrelay.kv_transfer.nixl_library import load_nixl
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.ucx_settings import set_unset
from kvrelay.mem_cache.geometry import Int64Array

Operation = Literal["READ", "WRITE"]
"""The direction of a transfer, from or to the peer's memory."""


class NixlTransfer:
    """One transfer in NIXL's hands.

    Releasing it does not stop it: bytes of a transfer that has not ended may still arrive.
    """

    def __init__(self, agent: Any, handle: object) -> None:
        self._agent = agent
        self._handle: object | None = handle

    @property
    def is_released(self) -> bool:
        """Whether NIXL has let go of it."""
        return self._handle is None

    def start(self) -> str:
        """Start it. Returns its state, see `check`."""
        state: str = self._agent.transfer(self._handle)
        return state

    def check(self) -> str:
        """Get its state: ``PROC`` while it runs, ``DONE``, or an error's name. May raise."""
        state: str = self._agent.check_xfer_state(self._handle)
        return state

    def query_backend(self) -> str:
        """Get the backend that NIXL has chosen for it, e.g. ``UCX``."""
        backend: str = self._agent.query_xfer_backend(self._handle)
        return backend

    def release(self) -> None:
        """Release it in NIXL. A second call does nothing."""
        if self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
            self._handle = self._agent = None


class NixlEndpoint:
    """A NIXL agent of this worker. Registered memory stays registered until the agent is destroyed.

    Args:
        name: of the agent; unique, so that a restarted worker is another agent.
        memory: the memory that peers may read and transfers write; of one device, and of the host.
    """

    def __init__(self, name: str, memory: Sequence[PoolLayout]) -> None:
        self._is_on_gpu = memory[0].memory_type == "VRAM"
        set_unset(on_gpu=self._is_on_gpu)
        nixl = load_nixl()
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._connected: dict[str, str] = {}
        """NIXL's names of the peers' agents, by their incarnations."""
        self._dying: weakref.ReferenceType[Any] | None = None
        self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False))
        regions: dict[str, list[tuple[int, int, int, str]]] = {}
        for part in memory:
            regions.setdefault(part.memory_type, []).append(_region(part))
        self._registrations = [
            self._agent.register_memory(of_type, memory_type)
            for memory_type, of_type in regions.items()
        ]
        self.metadata = bytes(self._agent.get_agent_metadata())
        """The bytes that peers pass to `connect`."""

    def register(self, memory: PoolLayout) -> None:
        """Register more memory that transfers of this worker may write to. Peers cannot read it."""
        registration = self._agent.register_memory([_region(memory)], memory.memory_type)
        self._registrations.append(registration)

    def make_progress(self) -> None:
        """Make progress on transfers, including reads by peers."""
        if self._agent is not None:
            self._agent.get_new_notifs()

    @property
    def connected(self) -> tuple[str, ...]:
        """The incarnations of the peers that are connected."""
        return tuple(self._connected)

    def knows(self, name: str) -> bool:
        """Whether a peer is connected."""
        return name in self._connected

    def connect(self, peer: PeerDescription) -> None:
        """Make a peer's memory known. Check the description first: its bytes are untrusted."""
        self._connected[peer.incarnation] = self._agent.add_remote_agent(peer.metadata)

    def disconnect(self, name: str) -> None:
        """Remove a peer's memory, if it is known. Connections stay until the agent is destroyed.

        Raises NIXL's exceptions, and `RuntimeError` if an earlier `destroy` has failed.
        """
        if name in self._connected:
            if self._agent is None:
                raise RuntimeError("the NIXL agent is still in use")
            self._agent.remove_remote_agent(self._connected[name])
            del self._connected[name]

    def destroy(self) -> bool:
        """Destroy the agent, whose transfers are all released. No peer may know its memory.

        A peer's read of memory that is no longer registered can kill this process.

        Returns:
            Whether it is gone: no byte of its transfers arrives any more. If not, something else
            still refers to it; call it again later.
        """
        if self._dying is None:
            self._dying = weakref.ref(self._agent.agent)
        self._agent = None
        if self._is_on_gpu:
            torch.cuda.synchronize()
        return self._dying() is None

    def prepare(
        self, operation: Operation, spans: SpanPairs, local: PoolLayout, remote: PoolLayout, to: str
    ) -> NixlTransfer:
        """Make a transfer, without starting it.

        Args:
            operation: READ copies from the peer, WRITE to it.
            spans: what to copy.
            local: any pool of this worker that is in the same memory as `spans.local`.
            remote: any pool of the peer that is in the same memory as `spans.remote`.
            to: the peer's incarnation.
        """
        handle = self._agent.initialize_xfer(
            operation,
            self._descriptors(spans.local, spans.lengths, local),
            self._descriptors(spans.remote, spans.lengths, remote),
            self._connected[to],
            b"",
        )
        return NixlTransfer(self._agent, handle)

    def _descriptors(self, addresses: Int64Array, lengths: Int64Array, pool: PoolLayout) -> object:
        device = np.full(len(addresses), pool.device_id, np.int64)
        rows = np.stack([addresses, lengths, device], axis=1).astype(np.uint64)
        return self._agent.get_xfer_descs(rows, pool.memory_type)


def _region(memory: PoolLayout) -> tuple[int, int, int, str]:
    return memory.address, memory.nbytes, memory.device_id, ""
