"""How a process that has used NIXL ends, where the system has RDMA's libraries, too."""

from __future__ import annotations

import subprocess
import sys
from ctypes.util import find_library

import pytest

A_READER = """
from pathlib import Path
from tests.kv_transfer.peer_process import make_pool
from kvrelay.kv_transfer.agent import TransferAgent

agent = TransferAgent("reader", [make_pool()], print)
agent.close()
print("libefa.so" in Path("/proc/self/maps").read_text())
"""


@pytest.mark.skipif(find_library("efa") is None, reason="libefa (ibverbs-providers) is missing")
def test_a_process_with_two_libnl_routes_ends_well() -> None:
    """UCX loads the system's libefa, and so a second libnl-route, if they are there."""
    ended = subprocess.run([sys.executable, "-c", A_READER], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-1] == "True", "libefa was not loaded"
