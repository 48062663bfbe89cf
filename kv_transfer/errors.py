"""The errors of moving KV between workers. All are `TransferError`."""

from __future__ import annotations


class TransferError(Exception):
    """A peer, a message or a transfer is wrong. The request may be tried again."""


class PeerRefusedError(TransferError):
    """A peer's description cannot be trusted, or its pages do not fit this worker's pools."""


class TransferRefusedError(TransferError):
    """The transport from a peer does not work, or is slower than the configured minimum."""


class ProtocolError(TransferError):
    """A hand-over message is malformed, or came in a state that does not allow it."""
