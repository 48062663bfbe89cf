"""The transport probe: measures how fast a worker can read from a peer, when they meet.

A puller reads scratch pages of its peer against the clock, and writes others. Those pages lie
beside the pools and look like the pools' pages. KV is only ever read, so it is the read that
must be fast enough; the speed of writes is reported beside it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.errors import TransferError
from kvrelay.kv_transfer.nixl_endpoint import Operation
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.kv_transfer.scratch import clear_landing, holds_scratch_of
from kvrelay.wire.load import PeerTransport

PROBE_TIMEOUT_S = 10.0
"""For all moves of one probe. No request holds memory for it yet."""
TIMED_MOVES = 5
"""Moves of which the fastest counts, because others may have been disturbed."""
ENOUGH_S = 0.5
"""After this time no further move is timed."""
MIN_OPTION = "--min-transfer-gigabytes-per-second"
"""The option of `kvrelay serve` that sets the least speed."""

_UNENDED = (PullState.QUEUED, PullState.RUNNING)


class TransportProber:
    """Measures peers, one at a time, because all reads arrive in the same scratch pages.

    Args:
        agent: reads and writes.
        floor: in bytes a second; a peer that is read more slowly is refused.
    """

    def __init__(self, agent: TransferAgent, floor: float) -> None:
        self._agent = agent
        self.floor = floor
        self._one_at_a_time = asyncio.Lock()
        self._last_moves: dict[str, Pull] = {}  # by peer

    async def measure(self, peer: str) -> PeerTransport:
        """Measure the transport from a peer, which the agent must know.

        Never raises for the peer's fault: one that is too slow, does not answer within
        `PROBE_TIMEOUT_S`, or sends other bytes than it has, comes back as refused.
        """
        async with self._one_at_a_time:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    return await self._measure(peer)
            except TimeoutError:
                return PeerTransport(peer, refusal=f"{peer} was not read in {PROBE_TIMEOUT_S:g} s")
            except TransferError as error:
                return PeerTransport(peer, refusal=str(error))

    def forget(self, peer: str) -> None:
        """Drop what is kept of a peer that died."""
        self._last_moves.pop(peer, None)

    async def _measure(self, peer: str) -> PeerTransport:
        scratch = self._agent.scratch
        running = {name for name, pull in self._last_moves.items() if pull.state in _UNENDED}
        if peer in running:
            raise TransferError(f"{peer}: an earlier probe has not ended yet")
        await asyncio.to_thread(clear_landing, scratch)
        first = await self._move(peer, "READ")  # this also connects the two
        same = await asyncio.to_thread(holds_scratch_of, scratch, first)
        if not same and not running:  # late bytes of an earlier probe may have come in between
            raise TransferError(f"{peer}: other bytes than it has were read")
        read, write = await self._time(peer, "READ"), await self._time(peer, "WRITE")
        found = PeerTransport(peer, first.backend, self._agent.transports, read, write)
        if read >= self.floor:
            return found
        asked = f"{MIN_OPTION} asks for {self.floor / 1e9:g}"
        return replace(found, refusal=f"{peer} is read at {found}; {asked}")

    async def _time(self, peer: str, operation: Operation) -> float:
        """Bytes a second of the fastest of up to `TIMED_MOVES` moves."""
        begun, best = time.monotonic(), 0.0
        for _ in range(TIMED_MOVES):
            moved = await self._move(peer, operation)
            best = max(best, moved.nbytes / moved.seconds)
            if time.monotonic() - begun > ENOUGH_S:
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

        self._last_moves[peer] = self._agent.probe(peer, operation, on_end)
        pull = await ended
        if pull.state is not PullState.DONE:
            raise TransferError(f"{peer}: {pull.error}")
        return pull
