"""One end of a slow read: `python -m tests.hosts.late_bytes peer`, or `reader [planted]`.

It says and is told one line at a time. The reader is told what the peer has said, then:

- ``read``: it starts to read all pages, and says ``reading`` once bytes have come;
- ``dead``: the peer's death is confirmed; it says ``passed`` when the read's fence has passed, and
  has zeroed the pages then, as if somebody else had them;
- ``count``: it says how many pages are not zero any more;
- ``alive``: it says ``alive`` when its transfer thread has answered, or else ``blocked``.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from unittest import mock

import numpy as np
import torch

from kvrelay.kv_transfer import peers
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.pull import Pull
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pool import KVPool
from tests.kv_transfer.planted import plant_early_fences

PAGES = 1024
"""16 MiB."""
ALIVE_S = 30.0
"""TCP tries to connect for two minutes."""


def make_pool() -> KVPool:
    geometry = KVGeometry(4, 2, 32, torch.float32, 16, PageOrder.PAGE_FIRST)
    return KVPool(geometry, PAGES, torch.device("cpu"))


def say(word: object) -> None:
    print(word, flush=True)  # noqa: T201 (read by who started this)


def serve() -> None:
    pool = make_pool()
    pool.data.fill_(1)
    agent = TransferAgent("peer", [pool], print)
    agent.begin_serving()
    say(pickle.dumps(agent.describe()).hex())
    sys.stdin.read()


def num_written(pool: KVPool) -> int:
    return sum(bool((pool.layer(3)[page] != 0).any()) for page in range(PAGES))


def until_passed(agent: TransferAgent, pull: Pull) -> None:
    while not pull.passed():
        alive = threading.Event()
        agent.report_alive(alive.set)
        alive.wait()


def read() -> None:
    pool = make_pool()
    agent = TransferAgent("reader", [pool], print)
    peer: PeerDescription = pickle.loads(bytes.fromhex(sys.stdin.readline()))  # our own child's
    agent.add_peer(peer)
    pages = [np.arange(PAGES)]
    pull: Pull | None = None
    for line in sys.stdin:
        match line.strip():
            case "read":
                pull = agent.pull(peer.incarnation, pages, pages, lambda _: None)
                while not num_written(pool):
                    time.sleep(0.01)
                say("reading")
            case "dead":
                assert pull is not None
                agent.confirm_death(peer.incarnation)
                until_passed(agent, pull)
                pool.data.zero_()
                say("passed")
            case "count":
                say(num_written(pool))
            case "alive":
                alive = threading.Event()
                agent.report_alive(alive.set)
                say("alive" if alive.wait(ALIVE_S) else "blocked")


if __name__ == "__main__":
    if sys.argv[1] == "peer":
        serve()
    else:
        mock.patch.object(peers, "ENDS_BY_ITSELF_S", 0.1).start()
        if "planted" in sys.argv:
            plant_early_fences()
        read()
