"""Which prefill workers' host tiers this worker can read: a transport of GPUs may reach no host."""

from __future__ import annotations

import logging
from typing import Final

from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.wire.load import PeerTransport

logger = logging.getLogger(__name__)

_MOST_REMEMBERED: Final = 1000
"""Prefill workers. One that is forgotten costs a read more, if its host cannot be read."""


class ReadableHosts:
    """Learns it from the probe of a transport, and from reads.

    A host whose first read has failed is not read any more, unless a later probe does, so that no
    attempt at a request fails for the same reason. One that was read once stays readable: what
    fails later is the connection, or the peer.
    """

    def __init__(self) -> None:
        self._is_readable: dict[str, bool] = {}
        """By the incarnation of the peer; the first that was met is the first to be forgotten."""

    def may_read(self, incarnation: str) -> bool:
        """Whether a peer may announce pages of its host."""
        return self._is_readable.get(incarnation, True)

    def note(self, pull: Pull) -> None:
        """A read has ended, well or not."""
        if pull.from_host:
            self._note(pull.peer, pull.error, was_read=pull.state is PullState.DONE)

    def note_probe(self, probe: PeerTransport) -> None:
        """A peer was probed; its host, too, if it has one."""
        if probe.host_refusal or probe.host_bytes_per_second:
            was_read = not probe.host_refusal
            self._note(probe.incarnation, probe.host_refusal, was_read=was_read)

    def _note(self, peer: str, error: str, *, was_read: bool) -> None:
        is_readable = was_read or self._is_readable.get(peer, False)
        if not is_readable and peer not in self._is_readable:
            logger.warning(
                "the host of %s cannot be read: only its device is, from now on (%s)",
                *(peer, error),
            )
        self._is_readable[peer] = is_readable
        if len(self._is_readable) > _MOST_REMEMBERED:
            del self._is_readable[next(iter(self._is_readable))]
