"""Hosts on one network, and what can go wrong with it.

The bridge is in a network namespace of its own, to which this machine has a link, too: nothing of
it is left when the processes that hold the namespaces end, and those end with the thread that has
made them, even if the tests are killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.hosts.commands import ABORT_CONNECTIONS, ip, run, shape
from tests.hosts.host import DEVICE, Addresses, Host, bury, first_child, isolated

TEMP_BYTES = 256 << 20
NOBODY = "02:00:00:00:00:01"
"""A network card that no host has: what is sent to it is lost, and the sender is not told."""
_BRIDGE = "lan"
_numbers = itertools.count()


class Lan:
    """Hosts that reach each other, and this machine, by IPv4 and IPv6.

    Args:
        shared: a folder that this machine and all hosts have at the same path.
    """

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self.hosts: dict[str, Host] = {}
        self._net = _free_net()
        self._stack = ExitStack()
        outer = isolated("--net", "sh", "-c", "echo ready; exec sleep infinity")
        self._stack.callback(bury, outer)
        self._stack.callback(outer.kill)
        self._switch = str(first_child(outer).pid)
        self._in_switch("ip", "link", "add", _BRIDGE, "type", "bridge")
        # Else the first seconds after a link is up are lost to the search for loops.
        self._in_switch("ip", "link", "set", _BRIDGE, "type", "bridge", "forward_delay", "0")
        self._in_switch("ip", "link", "set", _BRIDGE, "up")
        self._connect_this_machine()

    def add_hosts(self, names: Sequence[str], temp_bytes: int = TEMP_BYTES) -> None:
        """Start hosts, which know each other by name, and connect them."""
        first = len(self.hosts) + 1
        addresses = {name: self._addresses(first + n) for n, name in enumerate(names)}
        etc_hosts = self.shared / f"hosts-{first}"
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{one.ipv4} {name}" for name, one in addresses.items()]
        etc_hosts.write_text("\n".join(lines) + "\n")
        for name, own in addresses.items():
            host = Host(name, own, self.shared, etc_hosts, temp_bytes)
            self._stack.callback(host.kill)
            self.hosts[name] = host
            self._connect(host)

    def close(self) -> None:
        """End all hosts, and with them their network."""
        self._stack.close()

    def unplug(self, host: Host) -> None:
        """Take a host's link down."""
        self._in_switch("ip", "link", "set", _port(host), "down")

    def plug(self, host: Host) -> None:
        """Take it up again."""
        self._in_switch("ip", "link", "set", _port(host), "up")

    def cut(self, sender: Host, receiver: Host) -> None:
        """Lose all that one host sends to another, in silence; the other way stays as it is."""
        for address in _both(receiver):
            self._neighbour(sender, "replace", address, "lladdr", NOBODY, "nud", "permanent")

    def cut_both_ways(self, one: Host, other: Host) -> None:
        self.cut(one, other)
        self.cut(other, one)

    def heal(self, sender: Host, receiver: Host) -> None:
        """Undo `cut`."""
        for address in _both(receiver):
            self._neighbour(sender, "delete", address)

    def heal_both_ways(self, one: Host, other: Host) -> None:
        self.heal(one, other)
        self.heal(other, one)

    def slow(self, host: Host, rate: str, *, sends: bool = True, receives: bool = True) -> None:
        """Let a host send, receive, or both, at this rate at most; like ``16mbit``."""
        if sends:
            host.run("tc", "qdisc", "replace", "dev", DEVICE, *shape(rate))
        if receives:
            self._in_switch("tc", "qdisc", "replace", "dev", _port(host), *shape(rate))

    def speed_up(self, host: Host) -> None:
        """Undo `slow`."""
        for command in (
            lambda: host.run("tc", "qdisc", "delete", "dev", DEVICE, "root"),
            lambda: self._in_switch("tc", "qdisc", "delete", "dev", _port(host), "root"),
        ):
            with contextlib.suppress(Exception):  # it was slow in one direction alone
                command()

    def break_connections(self, host: Host) -> int:
        """Abort all TCP connections of a host; returns how many. New ones can be made at once."""
        return len(host.run(*ABORT_CONNECTIONS).splitlines())

    def _connect(self, host: Host) -> None:
        peer = ("peer", "name", DEVICE, "netns", str(host.pid))
        self._in_switch("ip", "link", "add", _port(host), "type", "veth", *peer)
        self._in_switch("ip", "link", "set", _port(host), "master", _BRIDGE, "up")
        for device in ("lo", DEVICE):
            host.run("ip", "link", "set", device, "up")
        own = host.addresses
        host.run("ip", "address", "add", f"{own.ipv4}/24", "dev", DEVICE)
        host.run("ip", "address", "add", f"{own.ipv6}/64", "dev", DEVICE, "nodad")

    def _connect_this_machine(self) -> None:
        device = f"kv{os.getpid()}-{next(_numbers)}"
        ip("link", "add", device, "type", "veth", "peer", "name", "outside", "netns", self._switch)
        # The kernel would take it away by itself, but later.
        self._stack.callback(ip, "link", "delete", device)
        self._in_switch("ip", "link", "set", "outside", "master", _BRIDGE, "up")
        own = self._addresses(254)
        ip("address", "add", f"{own.ipv4}/24", "dev", device)
        ip("link", "set", device, "up")
        ip("address", "add", f"{own.ipv6}/64", "dev", device, "nodad")

    def _neighbour(self, host: Host, action: str, address: str, *words: str) -> None:
        host.run("ip", "neighbour", action, address, "dev", DEVICE, *words)

    def _in_switch(self, *words: str) -> None:
        run("nsenter", "--target", self._switch, "--net", *words)

    def _addresses(self, number: int) -> Addresses:
        high, low = self._net
        return Addresses(f"10.{high}.{low}.{number}", f"fd6b:76::{high:x}:{low:x}:0:{number:x}")


def _port(host: Host) -> str:
    """The bridge's end of a host's link."""
    return f"to-{host.name}"


def _both(host: Host) -> tuple[str, str]:
    return host.addresses.ipv4, host.addresses.ipv6


def _free_net() -> tuple[int, int]:
    """The second and third number of a network 10.x.y.0/24 that this machine has no route to."""
    for number in itertools.count(os.getpid()):
        net = 64 + (number >> 8) % 64, number % 256
        if not ip("route", "show", "10.{}.{}.0/24".format(*net)):
            return net
    raise AssertionError("unreachable")


@contextmanager
def lan(names: Sequence[str], temp_bytes: int = TEMP_BYTES) -> Iterator[Lan]:
    """Hosts of these names on one network, which end with the context."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-lan-") as folder, ExitStack() as stack:
        network = Lan(Path(folder))
        stack.callback(network.close)
        network.add_hosts(names, temp_bytes)
        yield network
