"""What UCX is told, and which threads may call NIXL where pages are a GPU's."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from kvrelay.device import cuda_streams
from kvrelay.kv_transfer import agent as agent_module
from kvrelay.kv_transfer import checksums, ucx_settings
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.checksums import LocalPage
from kvrelay.kv_transfer.nixl_endpoint import NixlEndpoint
from kvrelay.wire.hand_over import PagePlace
from tests.kv_transfer.peer_process import make_pool

WAIT_S = 30.0


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"UCX_PROTO_EMULATION_ENABLE": "y"}
    monkeypatch.setattr(os, "environ", environment)
    ucx_settings.set_unset(on_gpu=True)
    assert environment == {
        "UCX_TCP_CONN_NB": "y",
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
        "UCX_PROTO_EMULATION_ENABLE": "y",
    }
    assert ucx_settings.describe_transports(on_gpu=True, environment=environment) == (
        "all UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on UCX_PROTO_EMULATION_ENABLE=y"
    )


def test_without_a_gpu_reads_may_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP has no reads of its own."""
    environment = {"UCX_TLS": "tcp"}
    monkeypatch.setattr(os, "environ", environment)
    ucx_settings.set_unset(on_gpu=False)
    assert environment == {"UCX_TLS": "tcp", "UCX_TCP_CONN_NB": "y"}
    assert ucx_settings.describe_transports(on_gpu=False, environment=environment) == "tcp"


def test_every_thread_that_calls_nixl_or_reads_pages_uses_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a thread with a context has UCX's CUDA transports."""
    entered: set[int] = set()
    called: dict[str, set[int]] = {}

    def enter(device: torch.device) -> None:
        assert device == torch.device("cpu")
        entered.add(threading.get_ident())

    def record(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: object, **options: object) -> object:
            called.setdefault(name, set()).add(threading.get_ident())
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for module in (agent_module, checksums):
        monkeypatch.setattr(module, "use_device", enter)
    record(NixlEndpoint, "__init__")
    record(NixlEndpoint, "make_progress")
    record(checksums.PageHasher, "_sum")
    hashed = threading.Event()
    agent = TransferAgent(f"entering-{time.monotonic_ns()}", [make_pool()], print)
    agent.hash_pages([LocalPage(PagePlace(0, 0), 1, 2)], lambda _: hashed.set())
    assert hashed.wait(WAIT_S)
    alive = threading.Event()
    agent.report_alive(alive.set)
    assert alive.wait(WAIT_S)
    agent.close()
    assert set(called) == {"__init__", "make_progress", "_sum"}
    assert len(set.union(*called.values())) == 3, "the maker's, the transfer's, the hasher's"
    for name, threads in called.items():
        assert threads <= entered, name


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_cpu_needs_no_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []
    for function in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, function, calls.append)
    device = torch.device(name, 0)
    cuda_streams.use_device(device)
    assert calls == ([device, device] if name == "cuda" else [])
