"""Which prefill workers' host tiers this worker can read: a transport of GPUs may reach no host."""

from __future__ import annotations

import logging
from typing import Final

from kvrelay.kv_transfer.pull import Pull, PullState

logger = logging.getLogger(__name__)

_MOST_REMEMBERED: Final = 1000
"""Prefill workers. One that is forgotten costs a read more, if its host cannot be read."""


class ReadableHosts:
    """Learns it from reads: the probe of the transport reads what lies on the device.

    A host whose first read has failed is not read any more, so that another attempt at the request
    does not fail for the same reason. One that was read once stays readable: what fails later is
    the connection, or the peer.
    """

    def __init__(self) -> None:
        self._is_readable: dict[str, bool] = {}
        """By the incarnation of the peer; the first that was met is the first to be forgotten."""

    def may_read(self, incarnation: str) -> bool:
        """Whether a peer may announce pages of its host."""
        return self._is_readable.get(incarnation, True)

    def note(self, pull: Pull) -> None:
        """A read has ended, well or not."""
        if not pull.from_host:
            return
        is_readable = pull.state is PullState.DONE or self._is_readable.get(pull.peer, False)
        if not is_readable and pull.peer not in self._is_readable:
            logger.warning(
                "the host of %s cannot be read: only its device is, from now on (%s)",
                *(pull.peer, pull.error),
            )
        self._is_readable[pull.peer] = is_readable
        if len(self._is_readable) > _MOST_REMEMBERED:
            del self._is_readable[next(iter(self._is_readable))]
