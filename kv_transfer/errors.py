"""The faults of moving KV between workers."""

from __future__ import annotations


class TransferError(Exception):
    """A peer, a message or a transfer is not as it must be; the request may be tried again."""


class PeerRefusedError(TransferError):
    """A peer's description cannot be trusted or does not fit this pool."""


class TransferRefusedError(TransferError):
    """The transport from a peer does not work, or is slower than what is asked of it."""


class ProtocolError(TransferError):
    """A hand-over message came where it may not."""
