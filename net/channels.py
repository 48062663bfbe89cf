"""Channels and servers for the connections between a cluster's processes, and to clients."""

from __future__ import annotations

import asyncio
import functools
import resource
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from kvrelay.net.channel_options import channel_options, server_options
from kvrelay.net.door_rules import MAX_MESSAGE_BYTES, WORKER, ListenerRule
from kvrelay.net.receiving import BoundedCalls, CallerOf
from kvrelay.net.tls import CurrentTls, TlsFiles

_POLLER: Final = "PollerCompletionQueue"
"""gRPC's class whose method reads the socket."""
_MOST_BYTES: Final = 4096
"""The most completions that one turn takes; the rest wakes the loop again."""


def worker_channel(
    address: str,
    credentials: CurrentTls | None,
    most_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel to a worker, with the certificates of this moment; without credentials, plain text.

    Args:
        address: host:port.
        credentials: from `worker_credentials`.
        most_bytes: the largest message, each way.
    """
    join_wakeups(asyncio.get_running_loop())
    options = channel_options(most_bytes)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(
        address, credentials.channel_credentials(), [*options, *credentials.channel_options]
    )


def worker_credentials(files: TlsFiles | None) -> CurrentTls | None:
    """Credentials for `worker_channel`, read from the files; None without files."""
    return None if files is None else CurrentTls(files)


def connection_of(context: grpc.aio.ServicerContext) -> str:
    """The caller of a call whose connection is the caller."""
    peer: str = context.peer()
    return peer


def worker_server() -> grpc.aio.Server:
    """A worker's server, without a listener yet."""
    join_wakeups(asyncio.get_running_loop())
    options = server_options(WORKER, MAX_MESSAGE_BYTES, internal=True)
    return grpc.aio.server(options=options, interceptors=[BoundedCalls(WORKER, connection_of)])


def front_server(
    rule: ListenerRule,
    most_bytes: int,
    *,
    guards: Sequence[grpc.aio.ServerInterceptor] = (),
    caller_of: CallerOf = connection_of,
    inner: Sequence[grpc.aio.ServerInterceptor] = (),
) -> grpc.aio.Server:
    """A server for clients or operators, without a listener yet.

    It takes as many connections as the process may open files, so that limit is raised to what
    the system allows.

    Args:
        rule: the rules of its methods.
        most_bytes: the largest message.
        guards: interceptors that are called before a call's message is received.
        caller_of: names the caller of a call.
        inner: interceptors next to the handlers.
    """
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    join_wakeups(asyncio.get_running_loop())
    options = server_options(rule, most_bytes, internal=False)
    interceptors = [*guards, BoundedCalls(rule, caller_of), *inner]
    return grpc.aio.server(options=options, interceptors=interceptors)


def bind(server: grpc.aio.Server, address: str, files: TlsFiles | None) -> int:
    """Open a listener; return its port. With files, it uses TLS and follows their changes.

    Raises:
        OSError: the port is in use, or a file cannot be read.
    """
    tls = None if files is None else CurrentTls(files)
    try:
        if tls is None:
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: is the port in use?") from error
    return port


def join_wakeups(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop take all of gRPC's completions in one turn; does nothing the second time.

    grpc.aio's poller thread writes a byte into a socket for each completed operation. The loop's
    reader takes one byte, and then all completions that wait. So thirty writes that complete
    together cost thirty turns of the loop, and all but the first find nothing.

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
