"""How often gRPC's completions wake the event loop; in a process whose first loop this is."""

from __future__ import annotations

import socket
import subprocess
import sys

from kvrelay.net.channels import _read_all_but_one

CALLS = 60

PROGRAM = f"""
import asyncio, sys, time
import grpc
from kvrelay.net.channels import join_wakeups

turns = 0

def counted(add):
    def add_reader(file, callback, *args):
        def count(*args):
            global turns
            turns += 1
            callback(*args)
        add(file, count, *args)
    return add_reader

async def main(join):
    loop = asyncio.get_running_loop()
    loop.add_reader = counted(loop.add_reader)
    if join:
        join_wakeups(loop)
        join_wakeups(loop)
    go, waiting = asyncio.Event(), []

    async def answer(request, context):
        waiting.append(context)
        await go.wait()
        for number in range(3):
            await context.write(b"%d" % number)

    handler = grpc.unary_stream_rpc_method_handler(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {{"m": handler}}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        async def call():
            return [one async for one in channel.unary_stream("/s/m")(b"")]
        calls = [asyncio.create_task(call()) for _ in range({CALLS})]
        while len(waiting) < {CALLS}:
            await asyncio.sleep(0.01)
        before = turns
        go.set()
        for _ in range(8):  # the loop is busy, while operations complete
            await asyncio.sleep(0)
            time.sleep(0.02)
        for answers in await asyncio.gather(*calls):
            assert answers == [b"0", b"1", b"2"], answers
        print(turns - before)
    await server.stop(None)

asyncio.run(main(sys.argv[1] == "join"))
"""


def count_turns(how: str) -> int:
    """The turns of the loop's readers for three writes, and as many receives, of each call."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60
    )
    return int(ran.stdout)


def test_completions_that_wait_together_wake_the_loop_once():
    assert count_turns("join") < 2 * CALLS < 4 * CALLS < count_turns("as gRPC does")


def test_completions_that_another_loop_has_taken_are_left_to_it():
    ours, grpcs = socket.socketpair()
    with ours, grpcs:
        _read_all_but_one(ours, lambda: ours.recv(1))
        grpcs.send(b"111")
        _read_all_but_one(ours, lambda: ours.recv(1))
        _read_all_but_one(ours, lambda: ours.recv(1))  # would wait


def test_completions_that_another_loop_takes_between_two_reads_are_left_to_it():
    class Raced(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            read = super().recv(size, flags)
            if flags & socket.MSG_PEEK:
                super().recv(size)
            return read

    reader, writer = socket.socketpair()
    with writer, Raced(fileno=reader.detach()) as raced:
        raced.setblocking(False)
        writer.send(b"123")
        _read_all_but_one(raced, lambda: 1 / 0)
