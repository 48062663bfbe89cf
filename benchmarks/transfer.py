"""Measures what a transfer costs: the agent beside bare NIXL, and a whole hand-over.

python -m benchmarks.transfer rate
python -m benchmarks.transfer hand-over

`rate` reads pages of another process's pool, scattered on both sides, many
requests' reads in flight at once. Both processes' pools are of `--device`. Four ways
take turns: the `TransferAgent`, which reads the other's device or its host tier, and
NIXL alone, which moves the same bytes in the same pieces with handles made before the
clock starts, or after. (The host's pages are page_first in any case.) GB/s are 10⁹
bytes a second: the median of the rounds, and the best. The ratio compares the bests,
which a busy machine disturbs least, to bare NIXL with handles made after the clock
starts: a server has to make them for every read, because each is of other pages.

`hand-over` starts a cluster of one prefill and one decode worker, sends prompts
one at a time, and takes two figures from each answer. `transfer` is the decode
worker's own, from the last announcement's arrival to the activation. `added` is
the time between the first token, which the prefill worker sends when its last
chunk is done, and the second, less the median time between two later tokens. It is
the time from the last chunk to the first decode step, messages included.
"""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import click
import grpc
import numpy as np
import torch

from kvrelay.deploy.load_generator.table import table
from kvrelay.deploy.nodes.models import ModelFolder, resolve_model, users_models
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.option_types import ADDRESS
from kvrelay.deploy.options.serve_options import DEFAULT_MODEL, ServeOptions
from kvrelay.device.cuda_streams import make_pinning
from kvrelay.kv_transfer.agent import TransferAgent
from kvrelay.kv_transfer.byte_runs import PoolLayout, pair_spans
from kvrelay.kv_transfer.nixl_library import load_nixl
from kvrelay.kv_transfer.peer_description import PeerDescription
from kvrelay.kv_transfer.pull import Pull, PullState
from kvrelay.kv_transfer.ucx_settings import set_unset
from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.mem_cache.geometry import Int64Array, KVGeometry, PageOrder
from kvrelay.mem_cache.pinned_pools import PinnedPools
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.torch_options import wait_for_device
from kvrelay.router.config import PlacementMode
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

PAGE_SIZE = 16
SMOLLM2 = (30, 3, 64)
"""The layers, KV heads and dimensions of SmolLM2-135M."""
WAIT_S = 120.0
PROGRESS_S = 500e-6
"""Between the bare target's progress calls: as often as a serving agent's."""
Pages = Sequence[tuple[Int64Array, Int64Array]]
"""For each read, the local page ids and the peer's."""


@dataclass(frozen=True)
class Memory:
    """A pool of a device and one of the host, to be made in any process.

    Attributes:
        geometry: the pages of the device's pool; the host's are page_first.
        pages: the number of pages of the device's pool.
        device: ``cpu``, ``cuda`` and so on.
        host_pages: the number of pages of the host's pool.
    """

    geometry: KVGeometry
    pages: int
    device: str
    host_pages: int

    def make(self) -> KVPool:
        """Make the device's pool."""
        return KVPool(self.geometry, self.pages, torch.device(self.device))

    def make_host(self) -> KVPool:
        """Make the host's pool."""
        geometry = replace(self.geometry, order=PageOrder.PAGE_FIRST)
        return KVPool(geometry, self.host_pages, torch.device("cpu"))


def content(pages: torch.Tensor, layer: int) -> torch.Tensor:
    """Compute the number that each of a served pool's pages holds in `layer`; exact in bfloat16."""
    return (pages % 199 + layer % 32).to(torch.bfloat16)


def fill(pool: KVPool) -> None:
    """Write each page's number into all of it."""
    pages = torch.arange(pool.total_pages, device=pool.data.device)
    for layer in range(pool.geometry.num_layers):
        pool.layer(layer)[:] = content(pages, layer).view(-1, 1, 1, 1, 1)


def holds(pool: KVPool, local: Int64Array, remote: Int64Array) -> bool:
    """Whether the first and the last layer of `local` pages hold what `remote` ones held."""
    device = pool.data.device
    here, there = (torch.from_numpy(one).to(device) for one in (local, remote))
    return all(
        bool((pool.layer(layer)[here].flatten(1) == content(there, layer)[:, None]).all())
        for layer in (0, pool.geometry.num_layers - 1)
    )


def _runs(state: str) -> bool:
    assert state in ("PROC", "DONE"), f"a read ended as {state}"
    return state == "PROC"


class Bare:
    """A NIXL agent without any code of kvrelay's, and a pool for it."""

    def __init__(self, name: str, memory: Memory) -> None:
        set_unset(on_gpu=memory.device != "cpu")
        nixl = load_nixl()
        self.pool = memory.make()
        self.layout = PoolLayout.of(self.pool)
        self.agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False))
        self._regions = [(self.layout.address, self.layout.nbytes, self.layout.device_id, "")]
        self.agent.register_memory(self._regions, self.layout.memory_type)

    def handles(self, peer: str, there: PoolLayout, reads: Pages) -> list[Any]:
        """A handle for each read, not started."""
        made = []
        for local, remote in reads:
            pairs = pair_spans(self.layout, local, there, remote)
            here = self._descriptors(self.layout, pairs.local, pairs.lengths)
            far = self._descriptors(there, pairs.remote, pairs.lengths)
            made.append(self.agent.initialize_xfer("READ", here, far, peer, b""))
        return made

    def finish(self, handles: list[Any]) -> None:
        """Start all reads, and check them until all have ended."""
        waiting = [handle for handle in handles if _runs(self.agent.transfer(handle))]
        while waiting:
            waiting = [one for one in waiting if _runs(self.agent.check_xfer_state(one))]

    def release(self, handles: list[Any]) -> None:
        """Release the handles of reads that have ended."""
        for handle in handles:
            self.agent.release_xfer_handle(handle)

    def _descriptors(self, of: PoolLayout, addresses: Int64Array, lengths: Int64Array) -> Any:
        rows = np.stack([addresses, lengths, np.full_like(addresses, of.device_id)], axis=1)
        return self.agent.get_xfer_descs(rows.astype(np.uint64), of.memory_type)


def serve_bare(connection: Connection, memory: Memory) -> None:
    """Serve in a process of its own: a bare agent's pool is read until a message comes."""
    bare = Bare("bare-target", memory)
    connection.send((bytes(bare.agent.get_agent_metadata()), bare.layout))
    while not connection.poll(PROGRESS_S):
        bare.agent.get_new_notifs()


def serve_agent(connection: Connection, memory: Memory) -> None:
    """Serve in a process of its own: a `TransferAgent`'s pools are read until a message comes."""
    pool, host = memory.make(), memory.make_host()
    fill(pool)
    fill(host)
    wait_for_device(pool.data.device)  # NIXL does not
    pinned = PinnedPools([host], make_pinning(pool.data.device))
    agent = TransferAgent(f"served-{time.monotonic_ns()}", [pool], print, host_pools=[host])
    agent.begin_serving()
    connection.send(agent.describe())
    connection.recv()
    agent.close()
    pinned.close()


class Peer:
    """A process whose pool is read."""

    def __init__(self, serve: Callable[[Connection, Memory], None], memory: Memory) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, memory), daemon=True)
        self._process.start()
        self.description: Any = self._connection.recv()

    def stop(self) -> None:
        """Tell the process to stop, and wait for its end."""
        self._connection.send("stop")
        self._process.join()


def read_by_agent(
    agent: TransferAgent, peer: PeerDescription, reads: Pages, *, from_host: bool
) -> list[Pull]:
    """Start all reads, of the peer's host or its device, at once; return them when all ended."""
    ended: queue.SimpleQueue[Pull] = queue.SimpleQueue()
    for local, remote in reads:
        agent.pull(peer.incarnation, [local], [remote], ended.put, from_host=from_host)
    return [ended.get(timeout=WAIT_S) for _ in reads]


def measure_rate(
    geometry: KVGeometry, device: str, requests: int, tokens: int, rounds: int
) -> list[list[str]]:
    """Measure the four ways to read; returns a row of the table for each."""
    each = tokens // PAGE_SIZE
    pages = requests * each
    memory = Memory(geometry, pages, device, pages)
    rng = np.random.default_rng(0)
    local, remote = (rng.permutation(pages).reshape(requests, each) for _ in range(2))
    reads = list(zip(local, remote, strict=True))
    bare, bare_peer = Bare("bare-reader", memory), Peer(serve_bare, memory)
    metadata, layout = bare_peer.description
    bare.agent.add_remote_agent(metadata)
    agent = TransferAgent("agent-reader", [memory.make()], print)
    agent_peer = Peer(serve_agent, memory)
    agent.add_peer(agent_peer.description)
    nbytes = pages * geometry.page_bytes

    def ready() -> float:
        handles = bare.handles("bare-target", layout, reads)
        begun = time.perf_counter()
        bare.finish(handles)
        seconds = time.perf_counter() - begun
        bare.release(handles)
        return seconds

    def made() -> float:
        begun = time.perf_counter()
        handles = bare.handles("bare-target", layout, reads)
        bare.finish(handles)
        bare.release(handles)
        return time.perf_counter() - begun

    def by_agent(*, from_host: bool) -> float:
        begun = time.perf_counter()
        pulls = read_by_agent(agent, agent_peer.description, reads, from_host=from_host)
        seconds = time.perf_counter() - begun
        for pull in pulls:
            assert pull.state is PullState.DONE, pull.error
        return seconds

    ways: dict[str, Callable[[], float]] = {
        "NIXL, handles ready": ready,
        "NIXL": made,
        "agent": partial(by_agent, from_host=False),
        "agent, host tier": partial(by_agent, from_host=True),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            taken = run()
            if number:  # the first connects
                seconds[way].append(taken)
    for peer in (bare_peer, agent_peer):
        peer.stop()
    agent.close()
    best = {way: nbytes / min(taken) / 1e9 for way, taken in seconds.items()}
    return [
        [
            geometry.order.value,
            way,
            f"{nbytes / statistics.median(taken) / 1e9:.2f}",
            f"{best[way]:.2f}",
            f"{best[way] / best['NIXL']:.2f}",
        ]
        for way, taken in seconds.items()
    ]


async def measure_hand_overs(
    stub: inference_pb2_grpc.InferenceServiceStub, tokens: int, prompts: int
) -> tuple[list[float], list[float]]:
    """The seconds `transfer` and `added` of each prompt. All prompts differ."""
    transfer: list[float] = []
    added: list[float] = []
    for number in range(prompts + 1):
        rng = np.random.default_rng(number)
        request = inference_pb2.GenerateRequest()
        request.input_ids.ids.extend(rng.integers(1000, 40_000, tokens).tolist())
        sampling = inference_pb2.SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        request.sampling_params.CopyFrom(sampling)
        arrived = []
        async for response in stub.Generate(request):
            if response.HasField("complete"):
                timings = response.complete.timings
            else:
                arrived.append(time.perf_counter())
        if number:  # the first one makes the workers shake hands
            first, *later = np.diff(arrived).tolist()
            transfer.append(timings.transfer_seconds)
            added.append(first - statistics.median(later))
    return transfer, added


async def hand_overs(options: ServeOptions, model: ModelFolder, tokens: int, prompts: int) -> str:
    """Start a cluster and measure; returns the table."""
    from kvrelay.deploy.deployment import deployed
    from kvrelay.deploy.start_progress import StartProgress

    async with (
        deployed(options, model, StartProgress(io.StringIO())) as deployment,
        grpc.aio.insecure_channel(deployment.router.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        transfer, added = await measure_hand_overs(stub, tokens, prompts)
    rows = []
    for name, seconds in (("transfer", transfer), ("added", added)):
        p10, p50, p90 = np.percentile(seconds, [10, 50, 90]) * 1000
        rows.append([name, f"{p10:.1f}", f"{p50:.1f}", f"{p90:.1f}"])
    return table(("ms", "p10", "median", "p90"), rows)


@click.group()
def main() -> None:
    """Print what a transfer costs."""


@main.command(context_settings={"show_default": True})
@click.option("--requests", type=click.IntRange(min=1), default=12, help="Read at once.")
@click.option("--tokens", type=click.IntRange(min=PAGE_SIZE), default=1024, help="Of each.")
@click.option("--rounds", type=click.IntRange(min=1), default=15)
@click.option("--device", default="cpu", help="Of both processes: cpu, cuda and so on.")
@click.option("--kv", type=(int, int, int), default=SMOLLM2, help="Layers, KV heads, dimensions.")
def rate(requests: int, tokens: int, rounds: int, device: str, kv: tuple[int, int, int]) -> None:
    """GB/s of the agent and of bare NIXL, both page orders."""
    rows = []
    for order in PageOrder:
        geometry = KVGeometry(*kv, torch.bfloat16, PAGE_SIZE, order)
        rows += measure_rate(geometry, device, requests, tokens, rounds)
    click.echo(table(("order", "by", "GB/s", "best", "ratio"), rows))


@main.command(context_settings={"show_default": True})
@click.option("--model", default=DEFAULT_MODEL, help="As `kvrelay serve --model`.")
@click.option("--tokens", type=click.IntRange(min=1), default=1024, help="Of a prompt.")
@click.option("--prompts", type=click.IntRange(min=2), default=20)
@click.option("--chunk-tokens", type=click.IntRange(min=1), default=512)
@click.option(
    "--page-order", type=click.Choice([one.value for one in PageOrder]), default="page_first"
)
@click.option(
    "--verify-pages",
    type=click.Choice([mode.value for mode in VerifyPages]),
    default="off",
    help="As `kvrelay serve --verify-pages`.",
)
@click.option("--grpc", "address", type=ADDRESS, default="127.0.0.1:0")
def hand_over(model: str, tokens: int, prompts: int, address: Any, **options: Any) -> None:
    """Milliseconds from the last chunk to the first decode step."""
    from kvrelay.deploy.nodes.local_ray import LocalRay

    found = resolve_model(model, "bfloat16", users_models(), lambda _: None)
    serve = ServeOptions(
        model=model,
        grpc=address,
        http=Address(address.host, 0),
        admin=address,
        metrics=address,
        threads=1,
        placement=PlacementMode.DISAGGREGATED,
        **options,
    )
    with LocalRay(serve.workers):
        click.echo(asyncio.run(hand_overs(serve, found, tokens, prompts)))


if __name__ == "__main__":
    main()
