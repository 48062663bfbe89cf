"""A planted fault: fences on the reads from a dead peer pass too early."""

from __future__ import annotations

from unittest import mock

from kvrelay.kv_transfer.peers import Peers


def settle_early(peers: Peers) -> None:
    """Take NIXL's word that a dead peer is removed for the end of the connections to it."""
    for incarnation in list(peers._awaited_deaths):
        peers._reads.give_up(incarnation)
        peers._reads.release_failed(incarnation)
        peers._endpoints.disconnect(incarnation)
        for failed in peers._reads._failed(incarnation):
            failed.pull.settle()
        del peers._awaited_deaths[incarnation]


def plant_early_fences() -> None:
    """For the rest of this process's life."""
    mock.patch.object(Peers, "_settle_deaths", settle_early).start()
