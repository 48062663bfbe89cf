"""The interface to KV transfers, implemented by `TransferAgent` and tests' simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvrelay.kv_transfer.checksums import LocalPage
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.geometry import Int64Array
from kvrelay.wire.agent_description import AgentDescription
from kvrelay.wire.hand_over import PageSum

MOST_DEAD: Final = 1000
"""The most deaths that are remembered. A handshake takes seconds, so few deaths come before it
ends."""


class Transfers(Protocol):
    """An interface to read peers' pages, and let peers read. For any thread; never blocks."""

    def pull(
        self,
        peer: str,
        local_pages: Sequence[Int64Array],
        remote_pages: Sequence[Int64Array],
        on_end: Callable[[Pull], None],
        *,
        from_host: bool = False,
    ) -> Pull:
        """Start to read pages of a peer into pages of this worker, an array of ids for each pool.

        The caller keeps `local_pages` from any other use until the returned pull has passed as a
        fence.

        Args:
            peer: the incarnation of the worker to read from.
            local_pages: the pages to read into.
            remote_pages: the pages to read; for each pool as many as in `local_pages`.
            on_end: called once, on another thread, when the read has ended, well or not.
            from_host: whether the peer's pages lie in its host pools.
        """
        ...

    def hash_pages(
        self, pages: Sequence[LocalPage], on_end: Callable[[tuple[PageSum, ...]], None]
    ) -> None:
        """Start to compute checksums of pages here.

        The caller locks the pages, or ignores the answer once they are no longer locked.

        Args:
            pages: the pages to hash.
            on_end: called once, on another thread, with the sums in the order of `pages`.
        """
        ...

    def watch_fences(self, on_passed: Callable[[], None]) -> None:
        """Call `on_passed`, on another thread, whenever fences of failed pulls have passed.

        The fence of a pull that ends well passes before its `on_end` is called. That of a failed
        pull may pass later.
        """
        ...

    def confirm_death(self, incarnation: str) -> None:
        """Note that a peer provably serves no more, so that fences on it can pass.

        Bytes that the peer had sent before may still arrive. The fences of its pulls pass once each
        has ended, or was given up, and the connections to the peer are closed.
        """
        ...

    def reconnect(self, incarnation: str) -> None:
        """Connect anew to a peer, if reads from it have failed.

        Their fences pass with the NIXL agent that ran them, if that can be replaced (see `Pull`).
        """
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of each pool, summed."""
        ...

    def meet(self, incarnation: str, plain: AgentDescription) -> None:
        """Make a peer's pools readable; reads that are ordered from now on may name it.

        Args:
            incarnation: the worker that is meant.
            plain: its description of its pools.

        Raises:
            PeerRefusedError: the description is another worker's, or was changed. Or its model or
                its pages do not fit this worker's.
        """
        ...

    def make_readable(self, on_ready: Callable[[AgentDescription], None]) -> None:
        """Prepare to be read by peers, though this worker reads itself.

        `on_ready` is called on another thread with the description for peers; never if that is not
        possible.
        """
        ...

    def begin_serving(self) -> None:
        """Note that a peer may read pages of one more request from now on."""
        ...

    def end_serving(self) -> None:
        """Note that a peer no longer reads the pages of one request."""
        ...
