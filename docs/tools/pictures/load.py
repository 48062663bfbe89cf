"""What the clients of the drawn cluster do, and what befalls the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Final

import grpc

from benchmarks.sessions import Load, Round, Way, ask, talk
from docs.tools.pictures.doors import Doors
from kvrelay.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    controller_pb2,
    controller_pb2_grpc,
    inference_pb2_grpc,
)
from kvrelay.v1 import inference_pb2 as pb

KVRELAY: Final = (sys.executable, "-m", "kvrelay.deploy")
SERVE: Final = (
    "--decode=2",
    "--kv-memory=32MiB",
    "--host-kv-memory=32MiB",
    "--verify-pages=sample",
    "--threads=1",
)
"""A small pool, so that it fills."""
OTHER_OPTIONS: Final = {"chunk-tokens": "128"}
_CONVERSATIONS: Final = 4
_TURNS: Final = Load(
    conversations=_CONVERSATIONS, turns=4, first_tokens=60, new_tokens=60, output_tokens=24
)
_LONG_ENOUGH: Final = ("--requests=100000", "--max-seconds=590")
_PATIENCE_SECONDS: Final = 60.0
_IMPATIENT: Final = 3
"""Clients that leave before the end."""
_LITTLE_PATIENCE_SECONDS: Final = 6.0


@contextlib.asynccontextmanager
async def loaded(doors: Doors) -> AsyncIterator[None]:
    """Clients call the cluster as long as this context.

    Some over gRPC and some over HTTP, with long prompts or long outputs; some give up early; and
    some talk, half of them in sessions, the others with the whole conversation in each request.
    """
    benches = [
        _bench("--target", doors.grpc, "--shape=256/96", "--concurrency=4"),
        _bench("--target", f"http://{doors.http}", "--shape=40/200", "--concurrency=4"),
    ]
    async with grpc.aio.insecure_channel(doors.grpc) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [_converse(stub, one) for one in range(_CONVERSATIONS)]
        calls += [_leave_early(stub, one) for one in range(_IMPATIENT)]
        tasks = [asyncio.create_task(one) for one in calls]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for bench in benches:
                bench.terminate()
            for bench in benches:
                await asyncio.to_thread(bench.wait)


def _bench(*options: str) -> subprocess.Popen[bytes]:
    patience = f"--request-timeout={_PATIENCE_SECONDS}"
    command = [*KVRELAY, "bench", *_LONG_ENOUGH, patience, *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603 (our own command)


async def _converse(stub: inference_pb2_grpc.InferenceServiceStub, number: int) -> None:
    """Have one conversation after another; one that fails is given up."""
    for conversation in itertools.count():
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                name = f"conversation-{number}-{conversation}"
                way = Way.PREFIXES if number % 2 else Way.SESSION
                await talk(stub, _TURNS, name, Round(way))
        await asyncio.sleep(0.5)


async def _leave_early(stub: inference_pb2_grpc.InferenceServiceStub, number: int) -> None:
    rng = random.Random(number)  # noqa: S311 (prompts)
    for call in itertools.count():
        request = pb.GenerateRequest(
            request_id=f"impatient-{number}-{call}",
            input_ids=pb.TokenIds(ids=[rng.randrange(100, 40_000) for _ in range(120)]),
            sampling_params=pb.SamplingParams(max_tokens=400, ignore_eos=True),
        )
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(_LITTLE_PATIENCE_SECONDS):
                await ask(stub, request)
        await asyncio.sleep(0.5)


async def roll_all(doors: Doors) -> None:
    """All workers are replaced, one after the other, by others with other options."""
    request = admin_pb2.RollWorkersRequest(options=OTHER_OPTIONS, max_surge=1)
    async with grpc.aio.insecure_channel(doors.admin) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        async for step in stub.RollWorkers(request):
            if step.reason:
                raise RuntimeError(f"{step.worker}: {step.reason}")


async def kill_one(doors: Doors) -> None:
    """The prefill worker's process dies."""
    async with grpc.aio.insecure_channel(doors.admin) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        cluster = await stub.GetCluster(controller_pb2.GetClusterRequest())
    [pid] = [one.pid for one in cluster.workers if one.role == pb.WORKER_ROLE_PREFILL]
    os.kill(pid, signal.SIGKILL)
