"""The prefill workers whose host tiers can be read: a transport of GPUs may reach no host."""

from __future__ import annotations

import logging
from typing import Final

from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.wire.load import PeerTransport

logger = logging.getLogger(__name__)

_MOST_REMEMBERED: Final = 1000
"""The most prefill workers that are remembered. A forgotten one whose host cannot be read costs one
more read."""


class ReadableHosts:
    """The readability of prefill workers' hosts, learned from transport probes and from reads.

    A host whose first read has failed is not read any more, unless a later probe reads it. So no
    two attempts at a request fail for this reason. A host that was read once stays readable: later
    failures are due to the connection, or to the peer.
    """

    def __init__(self) -> None:
        self._is_readable: dict[str, bool] = {}
        """The readability by the peer's incarnation; the first that was met is the first to be
        forgotten."""

    def may_read(self, incarnation: str) -> bool:
        """Whether a peer may announce pages of its host."""
        return self._is_readable.get(incarnation, True)

    def note(self, pull: Pull) -> None:
        """Note that a read has ended, well or not."""
        if pull.from_host:
            self._note(pull.peer, pull.error, was_read=pull.state is PullState.DONE)

    def note_probe(self, probe: PeerTransport) -> None:
        """Note that a peer was probed, and its host, too, if it has one."""
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
