"""The check of a peer's description, before NIXL loads its bytes."""

from __future__ import annotations

import dataclasses

import pytest

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.errors import PeerRefusedError
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.wire.messages import AGENT
from tests.kv_transfer.peer_process import make_pool


def test_description_is_checked_before_its_bytes_are_loaded(agent: TransferAgent) -> None:
    own = agent.describe()
    own.check(agent.incarnation, agent.layouts, agent.model)
    flipped = bytearray(own.metadata)
    flipped[len(flipped) // 2] ^= 1
    with pytest.raises(PeerRefusedError, match="does not match its digest"):
        dataclasses.replace(own, metadata=bytes(flipped)).check(
            agent.incarnation, agent.layouts, agent.model
        )
    with pytest.raises(PeerRefusedError, match="expected worker other"):
        own.check("other", agent.layouts, agent.model)
    other = dataclasses.replace(agent.layouts[0], geometry=make_pool(page_size=8).geometry)
    with pytest.raises(PeerRefusedError, match="do not fit"):
        own.check(agent.incarnation, [other], agent.model)
    with pytest.raises(PeerRefusedError, match="do not fit"):
        own.check(agent.incarnation, [*agent.layouts, *agent.layouts], agent.model)


def test_scratch_pages_are_like_the_pools(agent: TransferAgent) -> None:
    own = agent.describe()
    other = dataclasses.replace(own.scratch, geometry=make_pool(page_size=8).geometry)
    with pytest.raises(PeerRefusedError, match="scratch pages"):
        dataclasses.replace(own, scratch=other).check(agent.incarnation, agent.layouts, agent.model)


def test_pages_of_another_model_are_refused_and_both_are_named(agent: TransferAgent) -> None:
    own = agent.describe()
    assert own == PeerDescription.read(AGENT.from_message(AGENT.to_message(own.plain())))
    trained = dataclasses.replace(own.model, weights="12" * 32)
    with pytest.raises(PeerRefusedError) as refused:
        dataclasses.replace(own, model=trained).check(agent.incarnation, agent.layouts, own.model)
    assert str(refused.value) == (
        f"{agent.incarnation} has loaded model {trained.name}, not {own.model.name} as this "
        "worker has: weights (121212121212, not none)"
    )
