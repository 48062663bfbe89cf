"""The actor that `kvrelay doctor` runs on each node; it reads from the other nodes' actors."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvrelay.deploy.nodes.on_node import address_here, network_devices
from kvrelay.deploy.options.environment import set_network_devices
from kvrelay.wire.agent_description import AgentDescription

GIVE_UP_SECONDS: Final = 60.0
"""The time in which an actor must import its packages, or measure a peer."""
_TOKENS: Final = 16
_LANES: Final = re.compile(r"(?:inter|intra)-node cfg#\d+ (.*)")
_LANE: Final = re.compile(r"\brma\(([^)]*)\)")
_MESSAGES: Final = re.compile(r"\bam\(([^)]*)\)")
"""The UCX lanes for active messages, with which UCX emulates reads where no transport has them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The speed with which one examiner has read from another."""

    bytes_per_second: float
    backend: str
    """The name of NIXL's backend."""
    lanes: tuple[str, ...]
    """The transports that UCX moves KV by, such as `tcp/eth0`; empty if its log does not say."""
    refusal: str
    """The reason why nothing could be read; empty: it could."""


class Examiner:
    """An actor that looks at its node and measures others; it takes nothing that Ray counts.

    Args:
        advertised: the advertised hosts by node, as workers get them.
    """

    def __init__(self, advertised: Mapping[str, str]) -> None:
        self._address = address_here(advertised)
        devices = network_devices(self._address)
        if devices is not None:
            set_network_devices(devices)
        self._log = Path(tempfile.mkdtemp(prefix="kvrelay-doctor-")) / "ucx"
        # UCX reads them when NIXL is imported, and says which transports it has chosen.
        os.environ.setdefault("UCX_LOG_LEVEL", "info")
        os.environ["UCX_LOG_FILE"] = str(self._log)
        self._agent: Any = None
        self._prober: Any = None

    async def facts(self, model: str | None) -> dict[str, Any]:
        """Return the node's `NodeFacts` as a dict."""
        from kvrelay.deploy.examination.facts import facts_of_this_node, with_processor

        facts = await asyncio.to_thread(facts_of_this_node, self._address, model)
        return asdict(await asyncio.to_thread(with_processor, facts))

    async def clock(self) -> float:
        """Return seconds since 1970 by this node's clock."""
        return time.time()

    async def open(self, name: str, piece_bytes: int, floor: float) -> AgentDescription:
        """Let other examiners read from this one. Raises NIXL's error where it cannot be used.

        Args:
            name: this examiner's name, which no other has.
            piece_bytes: the size of a page.
            floor: the least bytes a second; a slower link has failed.
        """
        await asyncio.to_thread(self._open, name, piece_bytes, floor)
        description: AgentDescription = self._agent.describe().plain()
        return description

    async def measure(self, peer: AgentDescription) -> Reading:
        """Read from another examiner, and time it."""
        from kvrelay.kv_transfer.errors import TransferError
        from kvrelay.kv_transfer.peer_description import PeerDescription

        read = PeerDescription.read(peer)
        try:
            read.check(peer.incarnation, self._agent.layouts, self._agent.model)
        except TransferError as error:
            return Reading(0.0, "", (), str(error))
        self._agent.add_peer(read)
        found = await self._prober.measure(peer.incarnation)
        return Reading(found.read_bytes_per_second, found.backend, self._lanes(), found.refusal)

    async def close(self) -> None:
        """Remove the files that this process has written; it is ended next."""
        self._log.unlink(missing_ok=True)
        self._log.parent.rmdir()

    def _open(self, name: str, piece_bytes: int, floor: float) -> None:
        import torch

        from kvrelay.kv_transfer.agent import TransferAgent
        from kvrelay.kv_transfer.transport_probe import TransportProber
        from kvrelay.mem_cache.geometry import KVGeometry
        from kvrelay.mem_cache.pool import KVPool

        torch.set_num_threads(1)
        vector = piece_bytes // (2 * _TOKENS * torch.float16.itemsize)  # a key, and a value
        geometry = KVGeometry(1, 1, max(1, vector), torch.float16, _TOKENS)
        pool = KVPool(geometry, 1, torch.device("cpu"))
        self._agent = TransferAgent(name, [pool], self._fail)
        self._agent.begin_serving()
        self._prober = TransportProber(self._agent, floor)

    def _fail(self, reason: str) -> None:
        """End the process: the transfer engine has failed, so no answer can come any more."""
        os._exit(1)

    def _lanes(self) -> tuple[str, ...]:
        ctypes.CDLL(None).fflush(None)  # UCX writes by C's streams, which keep some kilobytes
        try:
            said = self._log.read_text()
        except OSError:
            return ()
        return lanes_of(said)


def lanes_of(log: str) -> tuple[str, ...]:
    """Return the transports and devices that UCX reads by between processes, from its log."""
    lines = _LANES.findall(log)
    found = [lane for line in lines for lane in _LANE.findall(line) or _MESSAGES.findall(line)]
    return tuple(dict.fromkeys(word for lane in found for word in lane.split()))
