"""A SUB socket of libzmq."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import zmq
import zmq.asyncio


@contextlib.asynccontextmanager
async def subscriber(
    port: int, *topics: bytes, host: str = "127.0.0.1", most_unread: int = 1000
) -> AsyncIterator[zmq.asyncio.Socket]:
    """Connected; its subscriptions arrive a little later."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, most_unread)
    socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(f"tcp://{host}:{port}")
        for topic in topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
