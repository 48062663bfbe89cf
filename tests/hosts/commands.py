"""The system's tools for networks, and what a machine lacks of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

BURST = "16kb"
QUEUE = "2s"
"""How much a slow link queues, in time. TCP sends again what is dropped beyond that."""


def why_not(tools: Sequence[str] = ("ip", "tc", "ss")) -> str:
    """What this machine lacks for networks of its own; empty if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux)"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return f"unshare: {made.stderr.decode().strip()}" if made.returncode else ""


def run(*words: str) -> str:
    """Run a command; returns what it prints. Raises `CommandError` if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class CommandError(Exception):
    """A tool has failed; the message is what it printed."""


def ip(*words: str) -> str:
    return run("ip", *words)


def shape(rate: str) -> tuple[str, ...]:
    """What `tc qdisc replace dev DEVICE` is told, so that the device sends at this rate."""
    return ("root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE)


ABORT_CONNECTIONS = ("ss", "--kill", "--no-header", "--tcp", "state", "established")
"""In a network: lets the kernel abort its connections, and prints a line for each."""
