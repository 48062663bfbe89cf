"""A transfer thread that is in a slow call of NIXL is alive, unless the call never ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.device.work_in_progress import WorkInProgress
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.assembly import Assembly
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.byte_runs import PoolLayout
from kvrelay.kv_transfer.nixl_endpoint import NixlEndpoint
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.wire.worker_info import WorkerRole
from tests.kv_transfer.peer_process import WAIT_S, make_pool


@pytest.fixture
def agent() -> Iterator[TransferAgent]:
    agent = TransferAgent("slow", [make_pool()], print)
    yield agent
    agent.close()


class Slow:
    """A call of NIXL that takes as long as the test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.entered, self.may_end = threading.Event(), threading.Event()
        call = getattr(NixlEndpoint, method)

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.entered.set()
            assert self.may_end.wait(WAIT_S)
            return call(*args, **kwargs)

        monkeypatch.setattr(NixlEndpoint, method, slow)


def is_alive(agent: TransferAgent) -> bool:
    alive = threading.Event()
    agent.report_alive(alive.set)
    return alive.wait(WAIT_S / 4)


@pytest.fixture
def other() -> Iterator[PeerDescription]:
    agent = TransferAgent("other", [make_pool()], print)
    yield agent.describe()
    agent.close()


def replace_agent(agent: TransferAgent, other: PeerDescription) -> None:
    agent._endpoints.replace()


def connect(agent: TransferAgent, other: PeerDescription) -> None:
    agent._endpoints.connect(other)


def disconnect(agent: TransferAgent, other: PeerDescription) -> None:
    agent._endpoints.disconnect(other.incarnation)


def disconnect_idle(agent: TransferAgent, other: PeerDescription) -> None:
    agent._peers._disconnect_idle()


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("__init__", replace_agent),
        ("connect", connect),
        ("disconnect", disconnect),
        ("disconnect", disconnect_idle),
    ],
)
def test_a_worker_that_is_in_a_slow_call_of_nixl_is_not_taken_for_hung(
    agent: TransferAgent,
    other: PeerDescription,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    call: Callable[[TransferAgent, PeerDescription], None],
):
    """As where a peer's host has died, and the machine of this one is busy."""
    slow = Slow(monkeypatch, method)
    prepare = (lambda: connect(agent, other)) if method == "disconnect" else None
    assert_alive_in(agent, slow, lambda: call(agent, other), prepare)


def test_a_worker_that_destroys_an_agent_is_not_taken_for_hung(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
):
    """The pass in which it was replaced destroys it."""
    slow = Slow(monkeypatch, "destroy")
    assert_alive_in(agent, slow, lambda: None, agent._endpoints.replace)


def test_a_worker_that_registers_memory_is_not_taken_for_hung(
    agent: TransferAgent, monkeypatch: pytest.MonkeyPatch
):
    slow, pool = Slow(monkeypatch, "register"), make_pool()
    assert_alive_in(agent, slow, lambda: agent._endpoints.register(PoolLayout.of(pool)))
    agent.close()  # before its memory is freed


def assert_alive_in(
    agent: TransferAgent,
    slow: Slow,
    call: Callable[[], object],
    prepare: Callable[[], object] | None = None,
) -> None:
    """Prepare, ask whether the thread is alive and make a slow call, in one pass of the thread."""
    before = threading.Event()

    def ask_and_call() -> None:
        if prepare is not None:
            prepare()
        agent.report_alive(before.set)
        call()

    agent.call_soon(ask_and_call)
    assert slow.entered.wait(WAIT_S)
    try:
        assert before.wait(WAIT_S / 4), "who had asked before the call began"
        assert is_alive(agent), "who asks while it lasts"
        assert agent.slow_calls.oldest is not None
    finally:
        slow.may_end.set()
    assert is_alive(agent)
    ended = threading.Event()
    agent.call_soon(ended.set)
    assert ended.wait(WAIT_S)
    assert agent.slow_calls.oldest is None


def test_a_thread_that_hangs_elsewhere_is_not_alive(agent: TransferAgent):
    may_end = threading.Event()
    agent.call_soon(may_end.wait)
    try:
        alive = threading.Event()
        agent.report_alive(alive.set)
        assert not alive.wait(0.2)
    finally:
        may_end.set()
    assert alive.wait(WAIT_S)


def test_a_call_of_nixl_that_never_ends_ends_the_worker():
    config = WorkerConfig("decode-0", WorkerRole.DECODE, Path("m"), "m", step_timeout=60.0)
    idle, slow = WorkInProgress(), WorkInProgress()
    agent = SimpleNamespace(hashing=idle, slow_calls=slow)
    parts: Any = SimpleNamespace(forward=SimpleNamespace(work=idle), agent=agent, copies=None)
    slow.begin(0)
    assert Assembly.hang(parts, config) is None
    slow._since -= 60
    given_up = Assembly.hang(parts, replace(config, step_timeout=59.0))
    assert given_up is not None
    assert given_up.reason == "the call of NIXL has not ended for 60 s (--step-timeout)"
    assert given_up.hanging_step is None
