"""The transport probe, which measures how fast a worker can read from a peer, when they meet.

A puller reads scratch pages of its peer against the clock, and writes others. Those pages lie
beside the pools and look like the pools' pages. KV is only ever read, so the read must be fast
enough; the speed of writes is only reported.

The host tier of a peer is read, too, because a transport between GPUs may reach no host. If that
fails, only the host is not read.

Peers are connected and checked side by side, each in a landing area of its own. Those that answer
take turns at being timed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.errors import TransferError
from kvrelay.kv_transfer.probe_landing import LandingArea, LandingAreas
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.kv_transfer.scratch_pages import clear_landing, holds_scratch_of
from kvrelay.wire.load import PeerTransport

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
"""The longest time of one probe as a whole. No request holds memory for it yet."""
TIMED_MOVES = 5
"""The number of timed moves. The fastest counts, because others may have been disturbed."""
ENOUGH_S = 0.5
"""Seconds after which no further move is timed."""
HOST_TIMEOUT_S = 2.0
"""The longest time of the probe of a peer's host tier."""
AGAIN_S = (0.1, 0.2, 0.4, 0.8)
"""Seconds to wait before a probe with a failed move is repeated."""
TURN_S = 2.0
"""The longest wait for the turn to be timed. After that two are timed at once, and may seem
slower."""
MIN_OPTION = "--min-transfer-gigabytes-per-second"
"""The option of `kvrelay serve` that sets the least speed."""

StartMove = Callable[[Callable[[Pull], None]], Pull]
"""A function that starts a move; its argument is called at the move's end, on another thread."""


class _MoveFailedError(TransferError):
    """An error of a probe's read or write, which may succeed on a new connection."""


class TransportProber:
    """The measurements of peers, any number at once. Lives on the event loop.

    Args:
        agent: reads and writes.
        floor: the least speed in bytes a second; a peer that is read more slowly is refused.
    """

    def __init__(self, agent: TransferAgent, floor: float) -> None:
        self._agent = agent
        self.floor = floor
        self._areas = LandingAreas(agent.make_landing)
        self._timing = asyncio.Lock()

    async def measure(self, peer: str, host_pages: int = 0) -> PeerTransport:
        """Measure the transport from a peer, which the agent must know.

        Never raises for the peer's fault. A peer is returned as refused if it is too slow, sends
        wrong bytes, or does not answer within `PROBE_TIMEOUT_S`.

        Args:
            peer: its incarnation.
            host_pages: of its host tier; 0: there is none to be read.
        """
        try:
            with self._areas.lend(peer) as area:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    found = await self._measure_connected(peer, area)
            if host_pages and not found.refusal:
                found = await self._measure_host(found, host_pages)
            return found
        except TimeoutError:
            return PeerTransport(peer, refusal=f"{peer} was not read in {PROBE_TIMEOUT_S:g} s")
        except TransferError as error:
            return PeerTransport(peer, refusal=str(error))

    async def _measure_connected(self, peer: str, area: LandingArea) -> PeerTransport:
        """Measure a peer, and again on a new connection if a move fails.

        A connection that broke while it was not used shows only now, and its cause may still last.
        This causes no refusal.
        """
        for seconds in AGAIN_S:
            try:
                return await self._measure(peer, area)
            except _MoveFailedError as error:
                logger.info("%s is connected anew in %g s: %s", peer, seconds, error)
            await asyncio.sleep(seconds)
            self._agent.reconnect(peer)
        return await self._measure(peer, area)

    async def _measure(self, peer: str, area: LandingArea) -> PeerTransport:
        read = partial(self._agent.read_scratch, peer, area.pages)
        write = partial(self._agent.write_scratch, peer)
        await asyncio.to_thread(clear_landing, area.pages)
        first = await _move(area, read)  # this also connects the two
        if not await asyncio.to_thread(holds_scratch_of, area.pages, first):
            raise TransferError(f"{peer}: other bytes than it has were read")
        async with self._turn():
            reads, writes = await _time(area, read), await _time(area, write)
        found = PeerTransport(peer, first.backend, self._agent.transports, reads, writes)
        if reads >= self.floor:
            return found
        asked = f"{MIN_OPTION} asks for {self.floor / 1e9:g}"
        return replace(found, refusal=f"{peer} is read at {found}; {asked}")

    async def _measure_host(self, found: PeerTransport, host_pages: int) -> PeerTransport:
        """Add the speed of reads from the peer's host, or the reason why there are none.

        Bytes are not compared, because any of them may be written meanwhile. They arrive in an area
        of their own. A read that hangs would otherwise keep the device's area from the next
        measurement.
        """
        peer = found.incarnation
        async with self._turn():
            try:
                with self._areas.lend(f"the host of {peer}") as area:
                    read = partial(self._agent.read_host, peer, host_pages, area.pages)
                    async with asyncio.timeout(HOST_TIMEOUT_S):
                        return replace(found, host_bytes_per_second=await _time(area, read))
            except TimeoutError:
                why = f"it was not read in {HOST_TIMEOUT_S:g} s"
            except TransferError as error:
                why = str(error)
        self._agent.reconnect(peer)  # it may have broken the connection, which the device needs
        return replace(found, host_refusal=why)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until no other peer is timed, but at most `TURN_S`: that peer may have stopped."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._timing.acquire()
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._timing.release()


async def _time(area: LandingArea, start: StartMove) -> float:
    """Measure the bytes a second of the fastest of up to `TIMED_MOVES` moves."""
    begun, best = time.monotonic(), 0.0
    for _ in range(TIMED_MOVES):
        moved = await _move(area, start)
        best = max(best, moved.nbytes / moved.seconds)
        if time.monotonic() - begun > ENOUGH_S:
            break
    return best


async def _move(area: LandingArea, start: StartMove) -> Pull:
    """Make one move and wait for its end.

    Raises:
        _MoveFailedError: it has failed.
        TransferError: NIXL has refused the area: no other move into it would do better.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Pull] = loop.create_future()

    def tell(pull: Pull) -> None:
        if not ended.done():
            ended.set_result(pull)

    def on_end(pull: Pull) -> None:
        loop.call_soon_threadsafe(tell, pull)

    area.add(start(on_end))
    pull = await ended
    if area.refused.is_set():
        raise TransferError(f"{pull.peer}: no memory of this worker takes its probe: {pull.error}")
    if pull.state is not PullState.DONE:
        raise _MoveFailedError(f"{pull.peer}: {pull.error}")
    return pull
