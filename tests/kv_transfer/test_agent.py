"""The transfer thread."""

from __future__ import annotations

import ctypes
import queue
import time

import pytest
import torch

from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.pull import PullState
from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from tests.idle import least_cpu_seconds
from tests.kv_transfer.peer_process import Peer, read


async def test_idle_agent_uses_no_cpu(agent: TransferAgent) -> None:
    peer = Peer()
    agent.add_peer(peer.description)
    assert read(agent, peer, [1], [1]).state is PullState.DONE
    assert await least_cpu_seconds(1.0, 0.02) < 0.02
    peer.stop()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_transfer_thread_has_the_context_of_its_pools_device() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    pool = KVPool(KVGeometry(4, 2, 32, torch.float32, 16), 8, last)
    agent = TransferAgent(f"on-gpu-{time.monotonic_ns()}", [pool], print)
    found: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def look() -> None:
        context = ctypes.c_void_p()
        ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
        found.put((context.value or 0, torch.cuda.current_device()))

    agent.call_soon(look)
    context, device = found.get(timeout=30)
    assert context
    assert device == last.index
    agent.close()
