"""One turn of the event loop for all of gRPC's waiting completions.

grpc.aio's poller thread writes a byte into a socket for each completed operation. The loop's reader
takes one byte, and then all completions that wait. So thirty writes that complete together cost
thirty turns of the loop, and all but the first find nothing.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any, Final

_POLLER: Final = "PollerCompletionQueue"
"""gRPC's class whose method reads the socket."""
_MOST_BYTES: Final = 4096
"""The most completions that one turn takes; the rest wakes the loop again."""


def join_wakeups(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop take all of gRPC's completions in one turn; does nothing the second time.

    Call it before the loop's first channel or server is made. It changes nothing for a loop that is
    not Python's own, or if gRPC wakes loops in another way.
    """
    if isinstance(loop.add_reader, functools.partial) or not hasattr(loop, "__dict__"):
        return
    # An attribute of this loop alone: Ray makes a worker's loop.
    vars(loop)["add_reader"] = functools.partial(_add_reader, loop.add_reader)


def _add_reader(
    add: Callable[..., Any], file: Any, callback: Callable[..., Any], *args: Any
) -> None:
    read = getattr(callback, "func", callback)
    if type(getattr(read, "__self__", None)).__name__ == _POLLER:
        add(file, _read_all_but_one, file, callback)
    else:
        add(file, callback, *args)


def _read_all_but_one(wakeups: socket.socket, take_completions: Callable[[], object]) -> None:
    """Take the completions and the bytes that announced them.

    gRPC queues a completion before it writes its byte, so none is lost. The loops of a process
    share the socket: another loop may have taken the bytes, and passes the completions on.
    """
    try:
        waiting = len(wakeups.recv(_MOST_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        if waiting > 1:
            wakeups.recv(waiting - 1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return
    take_completions()  # which reads the last one
