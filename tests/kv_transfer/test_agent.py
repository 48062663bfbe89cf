"""The transfer thread."""

from __future__ import annotations

import time

import pytest

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.pull import PullState
from tests.kv_transfer.peer_process import Peer, read


@pytest.mark.alone
def test_idle_agent_uses_no_cpu(agent: TransferAgent) -> None:
    peer = Peer()
    agent.add_peer(peer.description)
    assert read(agent, peer, [1], [1]).state is PullState.DONE
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.02
    peer.stop()
