"""What a pair of workers can move, measured when they meet.

A puller reads scratch pages of its peer, which are registered beside the pools and
look like their pages, and writes others, against the clock. KV is only ever read,
so it is the read that has to be fast enough; the other way is told beside it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from kvrelay.kv_transfer.agent import Operation, TransferAgent
from kvrelay.kv_transfer.errors import TransferError
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.kv_transfer.scratch import clear_landing, holds_scratch_of

ATTEST_S = 10.0
"""For all of it. Nothing is held for the peer yet."""
TIMED = 5
"""Reads, or writes, of which the best counts: others were disturbed."""
LONG_ENOUGH_S = 0.5
"""After which one that was timed is enough."""


_UNENDED = (PullState.QUEUED, PullState.RUNNING)


@dataclass(frozen=True, slots=True)
class Attestation:
    """What the transport between this worker and a peer was found to be."""

    peer: str
    """Its incarnation."""
    backend: str = ""
    """NIXL's, e.g. ``UCX``."""
    transports: str = ""
    """That the backend may choose from, as far as it was told."""
    read_gbps: float = 0.0
    """10⁹ bytes a second from the peer, in pieces of the pool's real size."""
    write_gbps: float = 0.0
    """To it."""
    refusal: str = ""
    """Why the peer is not read from; empty if it is."""

    def __str__(self) -> str:
        return f"{self.read_gbps:.3g} GB/s by {self.backend} ({self.transports})"


class Prober:
    """Measures peers, one at a time: what is read from them arrives at the same place.

    Args:
        agent: reads and writes.
        floor: GB/s below which a peer is refused.
    """

    def __init__(self, agent: TransferAgent, floor: float) -> None:
        self._agent = agent
        self._floor = floor
        self._turn = asyncio.Lock()
        self._last: dict[str, Pull] = {}  # by peer

    async def measure(self, peer: str) -> Attestation:
        """A peer that does not answer, or not with its bytes, is refused, as a slow one is."""
        async with self._turn:
            try:
                async with asyncio.timeout(ATTEST_S):
                    return await self._measure(peer)
            except TimeoutError:
                return Attestation(peer, refusal=f"{peer} was not read in {ATTEST_S:g} s")
            except TransferError as error:
                return Attestation(peer, refusal=str(error))

    def forget(self, peer: str) -> None:
        """It is gone."""
        self._last.pop(peer, None)

    async def _measure(self, peer: str) -> Attestation:
        scratch = self._agent.scratch
        running = {name for name, pull in self._last.items() if pull.state in _UNENDED}
        if peer in running:
            raise TransferError(f"{peer}: an earlier probe has not ended yet")
        await asyncio.to_thread(clear_landing, scratch)
        first = await self._move(peer, "READ")  # which connects the two, too
        same = await asyncio.to_thread(holds_scratch_of, scratch, first)
        if not same and not running:  # others' late bytes may have come in between
            raise TransferError(f"{peer}: other bytes than it has were read")
        read, write = await self._time(peer, "READ"), await self._time(peer, "WRITE")
        found = Attestation(peer, first.backend, self._agent.transports, read, write)
        if read >= self._floor:
            return found
        return replace(found, refusal=f"{peer} is read at {found}; {self._floor:g} are asked for")

    async def _time(self, peer: str, operation: Operation) -> float:
        """GB/s."""
        begun, best = time.monotonic(), 0.0
        for _ in range(TIMED):
            moved = await self._move(peer, operation)
            best = max(best, moved.nbytes / moved.seconds / 1e9)
            if time.monotonic() - begun > LONG_ENOUGH_S:
                break
        return best

    async def _move(self, peer: str, operation: Operation) -> Pull:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Pull] = loop.create_future()

        def tell(pull: Pull) -> None:
            if not ended.done():
                ended.set_result(pull)

        def on_end(pull: Pull) -> None:
            loop.call_soon_threadsafe(tell, pull)

        self._last[peer] = self._agent.probe(peer, operation, on_end)
        pull = await ended
        if pull.state is not PullState.DONE:
            raise TransferError(f"{peer}: {pull.error}")
        return pull
