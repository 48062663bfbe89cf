"""Ports that a test binds later, or again after a while, and that nobody else gets meanwhile."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_CHOSEN_BY_THE_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 20_000
"""Above what Ray's workers listen at."""


def free_port() -> int:
    """A port of 127.0.0.1 at which nobody listens.

    The kernel gives it to nobody who asks for any port, or who connects: it is below those, unless
    this machine lets the kernel choose among all.
    """
    below = range(_LOWEST, int(_CHOSEN_BY_THE_KERNEL.read_text().split()[0]))
    for port in random.SystemRandom().sample(below, k=min(100, len(below))) or [0]:
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            bound: int = one.getsockname()[1]
            return bound
    raise AssertionError("all ports are taken")
