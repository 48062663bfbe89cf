"""A cluster of processes of their own, every door of which is locked.

Who has the keys is served, and nobody else. A hand-over is one trace, no log has a prompt, and a
worker that is killed costs no token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvrelay.net.channels import worker_credentials
from kvrelay.net.tls import TlsFiles
from kvrelay.options.observing import LogFormat
from kvrelay.v1 import (
    hand_over_pb2,
    hand_over_pb2_grpc,
    inference_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.certificates import Authority, open_channel
from tests.cluster.commands import example, kvrelay
from tests.cluster.logged import assert_no_secrets, drive
from tests.cluster.running import RunningCluster, running
from tests.cluster.traced import CHUNK_TOKENS, ask_for_a_trace, assert_one_trace
from tests.known import known
from tests.otlp_receiver import Collector, collecting

TOKEN = "only-friends"
OPERATOR = "may-drain"
SECONDS = 60
LONG = 4000
"""Tokens, so many that the request still runs at the end of the test, which aborts it."""
TOKENS = f"""
[[token]]
name = "friend"
token = "{TOKEN}"

[[token]]
name = "operator"
sha256 = "{hashlib.sha256(OPERATOR.encode()).hexdigest()}"
rights = ["generate", "admin"]

[[token]]
name = "guest"
token = "another"
rights = ["generate"]
max_live_requests = 1
"""


@dataclass(frozen=True)
class Locked:
    """The cluster, and its keys."""

    cluster: RunningCluster
    files: TlsFiles
    tls: grpc.ChannelCredentials
    token_files: dict[str, Path]
    collector: Collector


@pytest.fixture(scope="module")
async def locked(
    ray: None, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Locked]:
    """One cluster for all tests of this file, in which a few hand-overs fail, too."""
    folder = tmp_path_factory.mktemp("locked")
    authority = Authority(folder / "tls")
    files = authority.issue()
    tokens = folder / "tokens.toml"
    tokens.write_text(TOKENS)
    token_files = {name: folder / name for name in (TOKEN, OPERATOR)}
    for token, path in token_files.items():
        path.write_text(f"{token}\n")
    tls = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    friend = grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(TOKEN))
    options: dict[str, Any] = {
        "tls_cert": files.cert,
        "tls_key": files.key,
        "tls_ca": files.ca,
        "auth_token_file": tokens,
        "dtype": "float32",
        "kv_memory": 8 << 20,
        "chunk_tokens": CHUNK_TOKENS,
        "worker_timeout": 5.0,
        "trace_sample": 0.0,
        "log_format": LogFormat.JSON,
        "log_level": logging.DEBUG,
        "debug_faults": "decode-0/fail:pull:2,prefill-0/drop:announce:8",
    }
    async with (
        collecting() as collector,
        running(tiny, friend, otlp=collector.endpoint, **options) as cluster,
    ):
        yield Locked(cluster, files, tls, token_files, collector)


async def test_no_log_has_prompts_or_outputs(
    locked: Locked, caplog: pytest.LogCaptureFixture
) -> None:
    """At the lowest level, and where something goes wrong, too."""
    caplog.set_level(logging.DEBUG)
    deployment = locked.cluster.deployment
    started = {worker.incarnation for worker in deployment.cluster.workers.values()}
    http = httpx.AsyncClient(
        base_url=f"https://{deployment.router.http_address}",
        headers={"authorization": f"Bearer {TOKEN}"},
        verify=ssl.create_default_context(cafile=str(locked.files.ca)),
        timeout=60,
    )
    outputs = await drive(locked.cluster.stub, http)
    router = caplog.text + json.dumps([vars(record) for record in caplog.records], default=str)
    await assert_no_secrets(started, outputs, router)
    await locked.cluster.assert_at_baseline()


async def test_a_hand_over_is_one_trace(locked: Locked) -> None:
    await ask_for_a_trace(locked.cluster, locked.collector)
    assert_one_trace(locked.collector)


async def test_a_locked_cluster_serves_its_friends(locked: Locked, tmp_path: Path) -> None:
    cluster, files, token_files = locked.cluster, locked.files, locked.token_files
    answer = await cluster.generate("the quick brown fox", max_tokens=6, ignore_eos=True)
    assert len(answer.tokens) == 6
    await cluster.assert_at_baseline()

    await strangers_do_not_reach_the_front(cluster, locked.tls)
    await strangers_do_not_reach_the_workers(cluster, files, tmp_path)
    await commands_are_told_the_keys(cluster, files, token_files[TOKEN])
    await the_example_brings_its_token(cluster, files, token_files[TOKEN])
    await operators_alone_drain(cluster, files, token_files)
    await nobody_learns_of_the_requests_of_others(cluster, locked.tls)
    await cluster.assert_at_baseline()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_killed_worker_comes_back_and_costs_no_token(locked: Locked) -> None:
    cluster = locked.cluster
    prompts = [[number, *range(3, 70)] for number in range(4)]
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
    expected = [(await cluster.generate(prompt, **sampling)).tokens for prompt in prompts]
    killed = cluster.deployment.cluster.workers["decode-0"]
    resubmitted = await cluster.metric("kvrelay_resubmissions_total")
    asked = [asyncio.create_task(cluster.generate(prompt, **sampling)) for prompt in prompts]
    async with asyncio.timeout(SECONDS):
        while not await generates(cluster, "decode-0"):
            await asyncio.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    assert [answer.tokens for answer in await asyncio.gather(*asked)] == expected
    assert await cluster.metric("kvrelay_resubmissions_total") > resubmitted
    assert cluster.deployment.cluster.workers["decode-0"].incarnation != killed.incarnation
    await cluster.assert_at_baseline()


async def generates(cluster: RunningCluster, name: str) -> bool:
    loads = [worker.load for worker in await cluster.status() if worker.worker == name]
    return any(load.running_requests for load in loads)


async def strangers_do_not_reach_the_front(
    cluster: RunningCluster, tls: grpc.ChannelCredentials
) -> None:
    address = cluster.deployment.router.grpc_address
    wrong = grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials("guess"))
    for credentials, code in (
        (tls, grpc.StatusCode.UNAUTHENTICATED),
        (wrong, grpc.StatusCode.UNAUTHENTICATED),
        (None, grpc.StatusCode.UNAVAILABLE),
    ):
        async with open_channel(address, credentials) as channel:
            stub = type(cluster.stub)(channel)
            assert await status_of(stub.GetModelInfo, inference_pb2.GetModelInfoRequest()) is code


async def strangers_do_not_reach_the_workers(
    cluster: RunningCluster, files: TlsFiles, folder: Path
) -> None:
    """The metadata of NIXL, above all, are for those who show a certificate."""
    assert files.ca is not None
    stranger = replace(Authority(folder / "other", "other").issue(), ca=files.ca)
    refused, opened = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK
    workers = cluster.deployment.cluster.workers
    assert set(workers) == {"prefill-0", "decode-0"}
    for credentials, code in (
        (None, refused),
        (grpc.ssl_channel_credentials(files.ca.read_bytes()), refused),
        (worker_credentials(stranger), refused),
        (worker_credentials(files), opened),
    ):
        for info in workers.values():
            async with open_channel(info.address, credentials) as channel:
                ask = worker_pb2_grpc.WorkerServiceStub(channel).GetPageOwners
                assert await status_of(ask, worker_pb2.GetPageOwnersRequest()) is code
        prefill = workers["prefill-0"]
        async with open_channel(prefill.address, credentials) as channel:
            describe = hand_over_pb2_grpc.HandOverServiceStub(channel).DescribeAgent
            request = hand_over_pb2.DescribeAgentRequest(incarnation=prefill.incarnation)
            assert await status_of(describe, request) is code


async def the_example_brings_its_token(
    cluster: RunningCluster, files: TlsFiles, token: Path
) -> None:
    server = cluster.deployment.router.grpc_address
    assert await example("tls_and_tokens.py", server, str(files.ca), str(token))


async def commands_are_told_the_keys(cluster: RunningCluster, files: TlsFiles, token: Path) -> None:
    at = ("--server", cluster.deployment.router.grpc_address)
    keys = (*at, "--ca", str(files.ca), "--token-file", str(token))
    generated = await kvrelay("generate", "the lazy dog", "--max-tokens", "4", *keys)
    assert generated.returncode == 0, generated.stderr
    refused = await kvrelay("generate", "the lazy dog", *at, "--ca", str(files.ca))
    assert refused.returncode == 1
    assert "UNAUTHENTICATED: authorization: a bearer token is needed" in refused.stderr

    certificate = ("--tls-cert", str(files.cert), "--tls-key", str(files.key))
    to_workers = (*certificate, "--tls-ca", str(files.ca))
    told = await kvrelay("status", "--json", "--pages", *keys, *to_workers)
    assert (told.returncode, told.stderr) == (0, "")
    assert all(worker["owners"] for worker in json.loads(told.stdout)["workers"])


async def operators_alone_drain(
    cluster: RunningCluster, files: TlsFiles, token_files: dict[str, Path]
) -> None:
    """The admin service has a listener of its own, and takes the right admin."""
    router = cluster.deployment.router
    keys = ("--admin", known(router.admin_address), "--ca", str(files.ca))
    refused = await kvrelay("drain", "none", *keys, "--token-file", str(token_files[TOKEN]))
    assert refused.returncode == 1
    assert "PERMISSION_DENIED: authorization: the token friend lacks the right" in refused.stderr
    told = await kvrelay("drain", "none", *keys, "--token-file", str(token_files[OPERATOR]))
    assert "NOT_FOUND: worker: there is no 'none'" in told.stderr
    elsewhere = ("--admin", router.grpc_address, "--ca", str(files.ca))
    told = await kvrelay("drain", "none", *elsewhere, "--token-file", str(token_files[OPERATOR]))
    assert "UNIMPLEMENTED" in told.stderr
    plain = ("--admin", known(router.admin_address))
    told = await kvrelay("drain", "none", *plain, "--token-file", str(token_files[OPERATOR]))
    assert "UNAVAILABLE" in told.stderr


async def nobody_learns_of_the_requests_of_others(
    cluster: RunningCluster, tls: grpc.ChannelCredentials
) -> None:
    """Neither that a request is live, nor what was computed for it; a token's limit is its own."""
    guest = grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials("another"))
    prompt = list(range(3, 60))
    own = cluster.stream(prompt, request_id="mine", max_tokens=LONG, ignore_eos=True)
    first = await own.read()
    assert first.request_id == "mine"
    address = cluster.deployment.router.grpc_address
    async with open_channel(address, guest) as channel:
        other = type(cluster.stub)(channel)
        assert not (await other.Abort(inference_pb2.AbortRequest(request_id="mine"))).aborted
        request = inference_pb2.GenerateRequest(request_id="mine")
        request.input_ids.ids.extend(prompt)
        request.sampling_params.CopyFrom(
            inference_pb2.SamplingParams(max_tokens=2, ignore_eos=True)
        )
        call = other.Generate(request)
        answers = [answer async for answer in call]
        assert answers[-1].complete.usage.cached_tokens == 0
        again = [answer async for answer in other.Generate(request)]
        assert again[-1].complete.usage.cached_tokens > 0
        request.sampling_params.max_tokens = LONG
        held = other.Generate(request)
        await held.read()
        request.request_id = "more"
        assert await status_of(other.Generate, request) is grpc.StatusCode.RESOURCE_EXHAUSTED
        held.cancel()
    assert (await cluster.stub.Abort(inference_pb2.AbortRequest(request_id="mine"))).aborted


async def status_of(method: Any, request: object) -> grpc.StatusCode:
    """Of a call, or of a stream's first message."""
    call = method(request, timeout=60)
    try:
        await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK
