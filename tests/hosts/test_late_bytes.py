"""Bytes of a host that was taken for dead come late, over a real link: they find no memory.

They are in flight when its death is confirmed: in the buffers of its kernel, which sends them
whether its processes are frozen, killed or well.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.hosts.host import Host
from tests.hosts.lan import Lan, lan
from tests.hosts.late_bytes import PAGES
from tests.hosts.ray_nodes import environment
from tests.hosts.skips import WHY_NO_HOSTS

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS),
]
RATE = "24mbit"
"""The read takes five seconds and more."""
LATE_S = 6.0
"""A kernel tries again after a few seconds when the link is up again."""


class Ends:
    """A peer and a reader on two hosts, whose read has begun."""

    def __init__(self, network: Lan, peer: subprocess.Popen[str], reader: subprocess.Popen[str]):
        self.network = network
        self.there, self.here = network.hosts["peer"], network.hosts["reader"]
        self.peer, self.reader = peer, reader

    def pause(self) -> None:
        self.there.pause()

    def wake(self) -> None:
        self.there.wake()

    def cut(self) -> None:
        self.network.cut_both_ways(self.there, self.here)

    def heal(self) -> None:
        self.network.heal_both_ways(self.there, self.here)

    def end(self) -> None:
        """The peer's process ends; its host goes on."""
        for process in self.there.processes():
            if "tests.hosts.late_bytes" in process.cmdline():
                process.send_signal(signal.SIGKILL)

    def die(self) -> None:
        """The reader is told of the death, and its fences have passed."""
        assert self.ask("dead") == "passed"

    def ask(self, what: str) -> str:
        assert self.reader.stdin is not None
        assert self.reader.stdout is not None
        self.reader.stdin.write(f"{what}\n")
        self.reader.stdin.flush()
        return self.reader.stdout.readline().strip()

    def late_pages(self) -> int:
        """Pages that were written after their fence had passed."""
        give_up_at = time.monotonic() + LATE_S
        while not (late := int(self.ask("count"))) and time.monotonic() < give_up_at:
            time.sleep(0.1)
        return late


@contextmanager
def spawned(host: Host, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = host.spawn(
        *(sys.executable, "-m", "tests.hosts.late_bytes", *words),
        environment={**environment(), "UCX_TLS": "tcp", "UCX_LOG_LEVEL": "fatal"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()


@contextmanager
def meeting(*, planted: bool = False, cut: bool = False) -> Iterator[Ends]:
    """A peer and a reader that connects to it, over a link that may be cut."""
    with lan(["peer", "reader"]) as network:
        hosts = network.hosts
        words = ("reader", "planted") if planted else ("reader",)
        with (
            spawned(hosts["peer"], "peer") as peer,
            spawned(hosts["reader"], *words) as reader,
        ):
            assert peer.stdout is not None
            assert reader.stdin is not None
            description = peer.stdout.readline()
            ends = Ends(network, peer, reader)
            if cut:
                ends.cut()
            reader.stdin.write(description)
            yield ends


@contextmanager
def reading(*, planted: bool) -> Iterator[Ends]:
    with meeting(planted=planted) as ends:
        ends.network.slow(ends.there, RATE, receives=False)
        assert ends.ask("read") == "reading"
        yield ends


Step = Callable[[Ends], None]
ORDERS: dict[str, list[Step]] = {
    "pause, death, wake": [Ends.pause, Ends.die, Ends.wake],
    "pause, cut, death, heal, wake": [Ends.pause, Ends.cut, Ends.die, Ends.heal, Ends.wake],
    "cut, pause, death, wake, heal": [Ends.cut, Ends.pause, Ends.die, Ends.wake, Ends.heal],
    "cut, death, heal": [Ends.cut, Ends.die, Ends.heal],
    "cut, end, death, heal": [Ends.cut, Ends.end, Ends.die, Ends.heal],
    "pause, cut, end, death, heal": [Ends.pause, Ends.cut, Ends.end, Ends.die, Ends.heal],
}


@pytest.mark.parametrize("planted", [False, True], ids=["fenced", "planted"])
@pytest.mark.parametrize("order", ORDERS)
def test_bytes_of_a_dead_host_find_no_memory(order: str, *, planted: bool) -> None:
    """And they do where fences are planted that pass early: the test can fail."""
    with reading(planted=planted) as ends:
        for step in ORDERS[order]:
            step(ends)
        late = ends.late_pages()
    assert (late > 0) is planted
    assert late < PAGES


def test_who_connects_to_a_peer_that_does_not_answer_goes_on_and_reads_when_it_does() -> None:
    """A transfer thread that waits moves no other peer's bytes, and its worker is restarted."""
    with meeting(cut=True) as ends:
        assert ends.ask("alive") == "alive"
        ends.heal()
        assert ends.ask("read") == "reading"
