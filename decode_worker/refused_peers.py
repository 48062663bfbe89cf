"""Prefill workers that nothing is read from, because the transport from them failed its probe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from kvrelay.kv_transfer.errors import TransferError, TransferRefusedError
from kvrelay.wire.load import PeerTransport
from kvrelay.wire.worker_info import WorkerAddress

logger = logging.getLogger(__name__)

MEASURE_AGAIN_S = 10.0
"""Seconds between measurements of a refused worker, which may have become faster."""
FIRST_AGAIN_S = 1.0
"""Seconds before the first measurement. The time doubles before each later one, up to
`MEASURE_AGAIN_S`."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    why: str
    measuring: asyncio.Task[None]


class RefusedPeers:
    """The slow or unreadable peers that are refused, and measured until they pass.

    Args:
        measure: connects to a peer and probes its transport once. It may raise what
            `Handshake.run` raises.
        on_probed: called with each measurement's result.
    """

    def __init__(
        self,
        measure: Callable[[WorkerAddress], Awaitable[PeerTransport]],
        on_probed: Callable[[PeerTransport], None],
    ) -> None:
        self._measure = measure
        self._on_probed = on_probed
        self._refusals: dict[str, _Refusal] = {}

    @property
    def incarnations(self) -> set[str]:
        """The workers that are refused now."""
        return set(self._refusals)

    def check(self, incarnation: str) -> None:
        """Raise `TransferRefusedError` if the worker is refused."""
        refusal = self._refusals.get(incarnation)
        if refusal is not None:
            raise TransferRefusedError(refusal.why)

    def refuse(self, peer: WorkerAddress, why: str) -> None:
        """Refuse a worker until a later measurement is good. The measurements cost no request."""
        logger.error("a prefill worker is refused: %s", why)
        measuring = asyncio.create_task(self._measure_until_good(peer))
        self._refusals[peer.incarnation] = _Refusal(why, measuring)

    def forget(self, incarnation: str) -> None:
        """Stop measuring a worker, because it is dead."""
        refusal = self._refusals.pop(incarnation, None)
        if refusal is not None:
            refusal.measuring.cancel()

    async def close(self) -> None:
        """Stop all measurements."""
        tasks = [refusal.measuring for refusal in self._refusals.values()]
        for incarnation in self.incarnations:
            self.forget(incarnation)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure_until_good(self, peer: WorkerAddress) -> None:
        delay = FIRST_AGAIN_S
        while True:
            await asyncio.sleep(min(delay, MEASURE_AGAIN_S))
            delay = min(2 * delay, MEASURE_AGAIN_S)
            found = await self._measure_again(peer)
            if found is None:
                continue
            if not found.refusal:
                del self._refusals[peer.incarnation]
            self._on_probed(found)
            if not found.refusal:
                break
        logger.warning("%s is refused no more: it is read at %s", found.incarnation, found)

    async def _measure_again(self, peer: WorkerAddress) -> PeerTransport | None:
        """Measure once. Returns `None` if the worker could not be measured."""
        try:
            return await self._measure(peer)
        except (TransferError, TimeoutError, grpc.RpcError) as error:
            logger.info("%s could not be measured again: %s", peer.incarnation, error)
        except Exception:
            logger.exception("%s could not be measured again", peer.incarnation)
        return None
