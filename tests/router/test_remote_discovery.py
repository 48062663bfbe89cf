"""Routers that hear of workers from a controller in another process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvrelay.deploy.controller.operators.controller_service import ControllerService
from kvrelay.deploy.controller.operators.scrape_targets import ScrapeTargets
from kvrelay.net.channel_options import channel_options
from kvrelay.net.channels import bind, front_server
from kvrelay.net.door_rules import OPERATORS
from kvrelay.router.access.auth import bearer
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import StartError
from kvrelay.router.remote_discovery import RemoteDiscovery
from kvrelay.router.router import Router
from kvrelay.v1 import controller_pb2_grpc, inference_pb2_grpc
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.cluster_state import ClusterState
from kvrelay.wire.messages import WORKER_LIST
from kvrelay.wire.worker_list import WorkerList
from tests.known import known
from tests.ports import free_port

from .cluster import Cluster, collect
from .scripted_worker import COUNTED, SECONDS, until
from .test_auth import RIGHTS, no_workers


async def no_state() -> ClusterState:
    raise NotImplementedError


@asynccontextmanager
async def controller(discovery: StaticDiscovery, address: str = "") -> AsyncIterator[str]:
    """What lists the workers to other routers, until the context ends; its address.

    It has no router of its own: scripted workers answer to the latest one alone.
    """
    address = address or f"127.0.0.1:{free_port()}"
    server = front_server(OPERATORS, 64 << 10)
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(
        ControllerService(discovery, ScrapeTargets("c", discovery), no_state), server
    )
    bind(server, address, None)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def remote(address: str, token: str | None = None) -> RemoteDiscovery:
    metadata = () if token is None else bearer(token)

    async def find() -> str:
        return address

    return RemoteDiscovery(
        find, lambda found: grpc.aio.insecure_channel(found, channel_options()), metadata
    )


@asynccontextmanager
async def second_router(config: RouterConfig, discovery: RemoteDiscovery) -> AsyncIterator[Router]:
    async with discovery.following():
        router = Router(config, discovery)
        await router.start()
        try:
            await asyncio.wait_for(router.wait_ready(), SECONDS)
            yield router
        finally:
            await router.stop()


async def tokens_by(router: Router) -> list[int]:
    async with grpc.aio.insecure_channel(router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(
            input_ids=pb.TokenIds(ids=[1, 2, 3]), sampling_params=pb.SamplingParams(max_tokens=8)
        )
        return (await collect(stub.Generate(request))).token_ids


def test_a_list_of_workers_crosses_processes_as_it_is(cluster: Cluster):
    endpoints = tuple(worker.endpoint for worker in cluster.workers)
    said = WorkerList(endpoints, (replace(endpoints[0], draining=True, pid=7),))
    assert WORKER_LIST.from_message(WORKER_LIST.to_message(said)) == said


async def test_a_second_router_serves_and_hears_of_changes(config: RouterConfig, cluster: Cluster):
    cluster.count()
    async with (
        controller(cluster.discovery) as address,
        second_router(config, discovery := remote(address)) as router,
    ):
        assert await tokens_by(router) == COUNTED
        [prefill, decode] = cluster.discovery.endpoints()
        cluster.discovery.replace([replace(prefill, draining=True)], [decode])
        async with asyncio.timeout(SECONDS):
            while discovery.awaited() != (decode,):
                await discovery.changed()
        assert discovery.endpoints() == (replace(prefill, draining=True),)


async def test_a_router_goes_on_while_the_controller_is_away(
    config: RouterConfig, cluster: Cluster
):
    cluster.count()
    async with AsyncExitStack() as first:
        address = await first.enter_async_context(controller(cluster.discovery))
        async with second_router(config, discovery := remote(address)) as router:
            before = discovery.endpoints()
            await first.aclose()
            assert await tokens_by(router) == COUNTED
            assert discovery.endpoints() == before
            cluster.discovery.replace(before, [before[0]])
            async with controller(cluster.discovery, address):
                await asyncio.wait_for(until(lambda: bool(discovery.awaited())), 60)
            assert await tokens_by(router) == COUNTED


async def test_a_controller_that_is_not_there_yet_is_waited_for(cluster: Cluster):
    async with controller(cluster.discovery) as address:
        pass
    discovery = remote(address)
    following = discovery.following()
    entering = asyncio.ensure_future(following.__aenter__())
    await asyncio.sleep(0.3)
    assert not entering.done()
    async with controller(cluster.discovery, address):
        await asyncio.wait_for(entering, 60)
    assert discovery.endpoints() == cluster.discovery.endpoints()
    await following.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        (None, "UNAUTHENTICATED: authorization: a bearer token is needed"),
        ("may-generate", "PERMISSION_DENIED: authorization: the token client lacks the right"),
    ],
)
async def test_a_controller_that_refuses_is_said(
    config: RouterConfig, tmp_path: Path, token: str | None, problem: str
):
    path = tmp_path / "tokens.toml"
    path.write_text(RIGHTS)
    guarded = replace(config, auth_token_file=path)
    router = Router(guarded, StaticDiscovery([]), no_workers())
    await router.start()
    address = known(router.admin_address)
    try:
        with pytest.raises(StartError) as caught:
            async with remote(address, token).following():
                pass
        assert str(caught.value).startswith(f"--controller: {address}: {problem}")
        async with remote(address, "may-drain").following():
            pass
    finally:
        await router.stop()


async def test_a_listener_for_clients_is_no_controller():
    server = front_server(OPERATORS, 64 << 10)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0', None)}"
    await server.start()
    try:
        with pytest.raises(StartError, match=f"^--controller: {address}: UNIMPLEMENTED: "):
            async with asyncio.timeout(60), remote(address).following():
                pass
    finally:
        await server.stop(None)
