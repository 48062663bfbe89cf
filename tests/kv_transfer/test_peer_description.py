"""The check of a peer's description, before NIXL loads its bytes."""

from __future__ import annotations

import dataclasses

import pytest

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.errors import PeerRefusedError
from tests.kv_transfer.peer_process import make_pool


def test_description_is_checked_before_its_bytes_are_loaded(agent: TransferAgent) -> None:
    own = agent.describe()
    own.check(agent.incarnation, agent.layouts)
    flipped = bytearray(own.metadata)
    flipped[len(flipped) // 2] ^= 1
    with pytest.raises(PeerRefusedError, match="does not match its digest"):
        dataclasses.replace(own, metadata=bytes(flipped)).check(agent.incarnation, agent.layouts)
    with pytest.raises(PeerRefusedError, match="expected worker other"):
        own.check("other", agent.layouts)
    other = dataclasses.replace(agent.layouts[0], geometry=make_pool(page_size=8).geometry)
    with pytest.raises(PeerRefusedError, match="do not fit"):
        own.check(agent.incarnation, [other])
    with pytest.raises(PeerRefusedError, match="do not fit"):
        own.check(agent.incarnation, [*agent.layouts, *agent.layouts])


def test_scratch_pages_are_like_the_pools(agent: TransferAgent) -> None:
    own = agent.describe()
    other = dataclasses.replace(own.scratch, geometry=make_pool(page_size=8).geometry)
    with pytest.raises(PeerRefusedError, match="scratch pages"):
        dataclasses.replace(own, scratch=other).check(agent.incarnation, agent.layouts)
