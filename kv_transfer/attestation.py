"""What a pair of workers can move, measured when they meet.

A puller reads scratch pages of its peer, which are registered beside the pools
and look like their pages, and times it. Pages travel in this direction alone,
so it is the one that is probed: the peer has no use for the puller's memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.errors import TransferError
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.kv_transfer.scratch import holds_scratch_of

ATTEST_S = 10.0
"""For all of it. Nothing is held for the peer yet."""
TIMED_READS = 5
"""Of which the best counts: others were disturbed."""


@dataclass(frozen=True, slots=True)
class Attestation:
    """What the transport from a peer was found to be."""

    peer: str
    """Its incarnation."""
    backend: str
    """NIXL's, e.g. ``UCX``."""
    transports: str
    """That the backend may choose from, as far as it was told."""
    gbps: float
    """10⁹ bytes a second, in pieces of the pool's real size."""
    floor: float = 0.0
    """What is asked of it."""

    @property
    def refused(self) -> bool:
        """It is slower than what is asked of it."""
        return self.gbps < self.floor

    def __str__(self) -> str:
        return f"{self.gbps:.3g} GB/s by {self.backend} ({self.transports})"


async def attest(agent: TransferAgent, peer: str, floor: float) -> Attestation:
    """Read a peer's scratch pages, once to connect, then against the clock.

    One at a time: the scratch pages that are read into are the same for all peers.

    Raises:
        TransferError: a read failed, took too long, or brought other bytes.
    """
    try:
        async with asyncio.timeout(ATTEST_S):
            agent.scratch.data.zero_()
            first = await _read(agent, peer)
            if not holds_scratch_of(agent.scratch, first):
                raise TransferError(f"scratch pages of {peer}: other bytes than it has were read")
            reads = [await _read(agent, peer) for _ in range(TIMED_READS)]
    except TimeoutError:
        raise TransferError(f"scratch pages of {peer}: not read in {ATTEST_S:g} s") from None
    best = max(read.nbytes / read.seconds for read in reads)
    return Attestation(peer, first.backend, agent.transports, best / 1e9, floor)


async def _read(agent: TransferAgent, peer: str) -> Pull:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Pull] = loop.create_future()

    def tell(pull: Pull) -> None:
        if not ended.done():
            ended.set_result(pull)

    def on_end(pull: Pull) -> None:
        loop.call_soon_threadsafe(tell, pull)

    agent.read_scratch(peer, on_end)
    pull = await ended
    if pull.state is not PullState.DONE:
        raise TransferError(f"scratch pages of {peer}: {pull.error}")
    return pull
