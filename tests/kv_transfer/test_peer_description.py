"""The check of a peer's description, before NIXL loads its bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

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


def test_kv_of_another_type_is_refused(agent: TransferAgent) -> None:
    """Its bytes could be read, and would mean other numbers."""
    layout = agent.layouts[0]
    fp8 = dataclasses.replace(layout.geometry, dtype=torch.float8_e4m3fn)
    pools = (dataclasses.replace(layout, geometry=fp8),)
    other = dataclasses.replace(
        agent.describe(), layouts=pools, scratch=dataclasses.replace(pools[0])
    )
    assert PeerDescription.read(AGENT.from_message(AGENT.to_message(other.plain()))) == other
    other.check(agent.incarnation, pools, agent.model)
    with pytest.raises(PeerRefusedError, match=r"float8_e4m3fn.*do not fit"):
        other.check(agent.incarnation, agent.layouts, agent.model)


def test_pages_of_the_host_fit_as_those_of_the_device_do(agent: TransferAgent) -> None:
    own, host = agent.describe(), agent.layouts[0]
    with_host = dataclasses.replace(own, host_layouts=(host,))
    assert (
        PeerDescription.read(AGENT.from_message(AGENT.to_message(with_host.plain()))) == with_host
    )
    with_host.check(agent.incarnation, agent.layouts, agent.model)
    smaller = dataclasses.replace(host, geometry=make_pool(page_size=8).geometry)
    for layouts in [(smaller,), (host, host)]:
        other = dataclasses.replace(own, host_layouts=layouts)
        with pytest.raises(PeerRefusedError, match=r"the host of .* do not fit"):
            other.check(agent.incarnation, agent.layouts, agent.model)


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
