"""A transfer agent that reads."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.mem_cache.pool import KVPool
from tests.kv_transfer.peer_process import kill_processes, make_pool


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    kill_processes()


@pytest.fixture
def pool() -> KVPool:
    """The agent's pool, zeroed."""
    return make_pool()


@pytest.fixture
def agent(pool: KVPool) -> Iterator[TransferAgent]:
    agent = TransferAgent(f"reader-{time.monotonic_ns()}", [pool], print)
    yield agent
    kill_processes()  # before it, which may wait for one that a failed test has left frozen
    agent.close()
