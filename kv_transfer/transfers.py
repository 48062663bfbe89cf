"""What a scheduler asks of KV transfers. `TransferAgent` does it, and so do tests' simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvrelay.kv_transfer.checksums import LocalPage
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.geometry import Int64Array
from kvrelay.wire.agent_description import AgentDescription
from kvrelay.wire.hand_over import PageSum

MOST_DEAD: Final = 1000
"""Deaths that are remembered. A handshake lasts for seconds, so it is later than few of them."""


class Transfers(Protocol):
    """Reads peers' pages, and lets peers read. No method blocks; each is safe on any thread."""

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

        The caller keeps `local_pages` from any other use until the returned pull, taken as a
        fence, has passed.

        Args:
            peer: the incarnation of the worker to read from.
            local_pages: where the bytes go.
            remote_pages: where they come from; for each pool as many as of `local_pages`.
            on_end: called once, on another thread, when the read has ended, well or not.
            from_host: the peer's pages lie in its host pools.
        """
        ...

    def hash_pages(
        self, pages: Sequence[LocalPage], on_end: Callable[[tuple[PageSum, ...]], None]
    ) -> None:
        """Start to compute checksums of pages here.

        The caller locks the pages, or ignores the answer once they are not locked any more.

        Args:
            pages: what to hash.
            on_end: called once, on another thread, with the sums in the order of `pages`.
        """
        ...

    def watch_fences(self, on_passed: Callable[[], None]) -> None:
        """Have `on_passed` called, on another thread, whenever fences of failed pulls have passed.

        A pull's fence passes before its `on_end` is called, or, if it has failed, perhaps later.
        """
        ...

    def confirm_death(self, incarnation: str) -> None:
        """Tell that a peer's process is known to be gone, so that fences on it can pass.

        Bytes that the peer had sent before may still arrive. The fences of its pulls pass once
        each has ended, or was given up, and the connections to the peer are closed.
        """
        ...

    def reconnect(self, incarnation: str) -> None:
        """Connect anew to a peer, if reads from it have failed: fences of those pass then."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of each pool, together."""
        ...

    def meet(self, incarnation: str, plain: AgentDescription) -> None:
        """Make a peer's pools readable; reads that are ordered from now on may name it.

        Args:
            incarnation: the worker that is meant.
            plain: what it says of its pools.

        Raises:
            PeerRefusedError: the description is another worker's, or was changed, or its model or
                its pages do not fit this worker's.
        """
        ...

    def make_readable(self, on_ready: Callable[[AgentDescription], None]) -> None:
        """Prepare to be read by peers, though this worker reads itself.

        `on_ready` is called on another thread with what peers need; never if that is not possible.
        """
        ...

    def begin_serving(self) -> None:
        """Tell that a peer may read pages of one more request from now on."""
        ...

    def end_serving(self) -> None:
        """Tell that a peer reads the pages of one request no longer."""
        ...
