"""Who may call a real router's public service, with tokens and with TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvrelay.deploy.controller.changes.steps import DrainStep, RollOrder, ScaleStep
from kvrelay.deploy.controller.operators.operators_listener import OperatorServices
from kvrelay.net.tls import TlsFiles
from kvrelay.router.access.auth import bearer
from kvrelay.router.access.current_tokens import CurrentTokens
from kvrelay.router.access.token_file import read_tokens
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import (
    CannotRoll,
    CannotScale,
    CannotShift,
    StartError,
    UnknownWorker,
)
from kvrelay.router.router import Router
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc, worker_pb2
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.cluster_state import ClusterState
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.certificates import Authority
from tests.known import known

from .cluster import collect, running, status_of
from .scripted_worker import SECONDS, ScriptedWorker

TOKENS = "# alice\nalpha-1\n\n  beta_2==  \n"
OK = grpc.StatusCode.OK
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def guarded(config: RouterConfig, tmp_path: Path) -> RouterConfig:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    return replace(config, auth_token_file=path)


@asynccontextmanager
async def front(config: RouterConfig) -> AsyncIterator[str]:
    """A router without workers."""
    router = Router(config, StaticDiscovery([]))
    await router.start()
    try:
        yield router.grpc_address
    finally:
        await router.stop()


async def info(
    address: str,
    metadata: Any = (),
    credentials: grpc.ChannelCredentials | None = None,
) -> tuple[grpc.StatusCode, str]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options)
    async with channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return OK, ""


async def test_a_known_token_opens(guarded: RouterConfig):
    async with front(guarded) as address:
        for value in ("Bearer alpha-1", "bearer alpha-1", "BEARER  beta_2==", "Bearer beta_2== "):
            assert await info(address, (("authorization", value),)) == (OK, "")


async def test_anything_else_does_not(guarded: RouterConfig):
    missing, other, unknown = (
        "authorization: a bearer token is needed",
        "authorization: must be 'Bearer' and one token",
        "authorization: the bearer token is not in the router's --auth-token-file",
    )
    async with front(guarded) as address:
        for values, detail in (
            ([], missing),
            (["Basic alpha-1"], other),
            (["alpha-1"], other),
            (["Bearer wrong", "Bearer alpha-1"], other),
            (["Bearer alpha-2"], unknown),
            (["Bearer alpha-"], unknown),
            (["Bearer alpha-1 beta_2=="], unknown),
            (["Bearer # alice"], unknown),
            (["Bearer "], unknown),
        ):
            metadata = tuple(("authorization", value) for value in values)
            assert await info(address, metadata) == (UNAUTHENTICATED, detail)


async def test_every_kind_of_call_is_guarded_but_health_checks(guarded: RouterConfig):
    async with front(guarded) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        refused = await status_of(stub.Generate(pb.GenerateRequest(text="x")))
        assert refused.code() is UNAUTHENTICATED

        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(reflection.ServerReflectionInfo(iter([ask]))))
        assert caught.value.code() is UNAUTHENTICATED
        call = reflection.ServerReflectionInfo(iter([ask]), metadata=bearer("alpha-1"))
        assert (await anext(aiter(call))).list_services_response.service

        unknown = channel.unary_unary("/no.such.Service/Method")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"")
        assert caught.value.code() is UNAUTHENTICATED

        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert (await check).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_big_message_without_a_token_is_not_read(guarded: RouterConfig):
    async with front(guarded) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        big = pb.GenerateRequest(text="x" * (4 * guarded.max_message_bytes))
        # Read, it would be RESOURCE_EXHAUSTED.
        assert (await status_of(stub.Generate(big))).code() is UNAUTHENTICATED


async def test_without_a_file_everybody_may_come(config: RouterConfig):
    async with front(config) as address:
        assert await info(address) == (OK, "")
        assert await info(address, bearer("whatever")) == (OK, "")


async def test_the_front_speaks_tls(guarded: RouterConfig, tmp_path: Path):
    authority = Authority(tmp_path / "tls")
    files = authority.issue()
    guarded = replace(guarded, front_tls=TlsFiles(files.cert, files.key))
    ca = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    stranger = grpc.ssl_channel_credentials(Authority(tmp_path / "other").ca.read_bytes())
    async with front(guarded) as address:
        assert (await info(address, bearer("alpha-1"), ca))[0] is OK
        assert (await info(address, (), ca))[0] is UNAUTHENTICATED
        for credentials in (None, stranger):
            code, _ = await info(address, bearer("alpha-1"), credentials)
            assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        (b"", "contains no token"),
        (b"# none\n\n", "contains no token"),
        (b"good\ntwo words\n", "line 2 is not a token"),
        (b"caf\xc3\xa9\n", "line 1 is not a token"),
    ],
)
async def test_a_file_without_usable_tokens_is_one_line(
    config: RouterConfig, tmp_path: Path, content: bytes | None, problem: str
):
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: {problem}") as caught:
        read_tokens(path)
    assert "words" not in str(caught.value)
    router = Router(replace(config, auth_token_file=path), StaticDiscovery([]))
    with pytest.raises(StartError, match=f"^--auth-token-file: {path}: {problem}"):
        await router.start()


async def test_missing_certificates_are_one_line(config: RouterConfig, tmp_path: Path):
    none = TlsFiles(tmp_path / "crt", tmp_path / "key", tmp_path / "ca")
    for changed in (
        replace(config, worker_tls=none),
        replace(config, front_tls=replace(none, ca=None)),
    ):
        with pytest.raises(StartError, match="No such file"):
            await Router(changed, StaticDiscovery([])).start()


RIGHTS = """
[[token]]
name = "client"
token = "may-generate"
[[token]]
name = "operator"
token = "may-drain"
rights = ["admin"]
"""


class NoWorkers:
    """An administrator of a cluster without workers."""

    async def drain(self, worker: str, *, remove: bool) -> AsyncIterator[DrainStep]:
        raise UnknownWorker(worker, [])
        yield  # an iterator, by this

    async def scale(self, wanted: Mapping[WorkerRole, int]) -> AsyncIterator[ScaleStep]:
        raise CannotScale("prefill: the cluster has no such workers")
        yield  # an iterator, by this

    async def roll(self, order: RollOrder) -> AsyncIterator[ScaleStep]:
        raise CannotRoll("undo: there was no roll")
        yield  # an iterator, by this

    async def shift(self, successor: str) -> None:
        raise CannotShift("its router is in its own process")

    async def state(self) -> ClusterState:
        raise NotImplementedError


def no_workers() -> OperatorServices:
    return OperatorServices(NoWorkers(), StaticDiscovery([]), "default")


async def test_each_service_takes_its_own_right(config: RouterConfig, tmp_path: Path):
    path = tmp_path / "tokens.toml"
    path.write_text(RIGHTS)
    router = Router(replace(config, auth_token_file=path), StaticDiscovery([]), no_workers())
    await router.start()
    try:
        async with (
            grpc.aio.insecure_channel(router.grpc_address) as front,
            grpc.aio.insecure_channel(known(router.admin_address)) as back,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(front)
            tokenize = (stub.Tokenize, pb.TokenizeRequest(text="x"))
            abort = (stub.Abort, pb.AbortRequest(request_id="x"))
            server_info = (stub.GetServerInfo, pb.GetServerInfoRequest())
            drain = (admin_pb2_grpc.AdminServiceStub(back).DrainWorker, DRAIN)
            scale = (admin_pb2_grpc.AdminServiceStub(back).ScaleWorkers, SCALE)
            for call, token, expected in (
                (tokenize, "may-generate", OK),
                (abort, "may-generate", OK),
                (server_info, "may-generate", OK),
                (drain, "may-generate", DENIED),
                (scale, "may-generate", DENIED),
                (scale, "may-drain", grpc.StatusCode.FAILED_PRECONDITION),
                (tokenize, "may-drain", DENIED),
                (abort, "may-drain", DENIED),
                (server_info, "may-drain", OK),
                (drain, "may-drain", grpc.StatusCode.NOT_FOUND),
                (drain, "guess", UNAUTHENTICATED),
            ):
                code, detail = await outcome(*call, metadata=bearer(token))
                assert code is expected, detail
            _, detail = await outcome(*drain, metadata=bearer("may-generate"))
            assert detail.startswith("authorization: the token client lacks the right admin")
            assert (await outcome(*drain))[0] is UNAUTHENTICATED
    finally:
        await router.stop()


class Publishing(ScriptedWorker):
    """Publishes KV events, and has found a prefix in its index."""

    @property
    def endpoint(self) -> WorkerInfo:
        return replace(super().endpoint, kv_events_address="127.0.0.1:9")


async def test_what_tells_of_all_tenants_is_shown_to_admins(config: RouterConfig, tmp_path: Path):
    path = tmp_path / "tokens.toml"
    path.write_text(RIGHTS)
    worker = Publishing("aggregated-0", WorkerRole.AGGREGATED)
    worker.first_load.reused_share = 0.5
    tokenizer = load_tokenizer(config.model_path).sha256
    worker.model = replace(worker.model, tokenizer=tokenizer)
    await worker.start()
    router = Router(replace(config, auth_token_file=path), StaticDiscovery([worker.endpoint]))
    await router.start()
    await asyncio.wait_for(router.wait_ready(), SECONDS)
    try:
        async with grpc.aio.insecure_channel(router.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for token, expected in (("may-generate", ("", 0)), ("may-drain", ("127.0.0.1:9", 0.5))):
                by, seen = bearer(token), []
                for answer in (
                    await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=by),
                    await stub.GetLoads(pb.GetLoadsRequest(), metadata=by),
                ):
                    [shown] = answer.workers
                    assert shown.load.pools[0].free == 64
                    if isinstance(answer, pb.GetServerInfoResponse):
                        assert answer.HasField("requests") == (token == "may-drain")
                    seen.append((shown.kv_events_address, shown.load.reused_share))
                assert seen == [expected] * 2
    finally:
        await router.stop()
        await worker.stop()


async def test_operators_have_a_listener_of_their_own(config: RouterConfig):
    router = Router(config, StaticDiscovery([]), no_workers())
    await router.start()
    try:
        async with (
            grpc.aio.insecure_channel(router.grpc_address) as front,
            grpc.aio.insecure_channel(known(router.admin_address)) as back,
        ):
            drain = admin_pb2_grpc.AdminServiceStub
            code, _ = await outcome(drain(front).DrainWorker, DRAIN)
            assert code is grpc.StatusCode.UNIMPLEMENTED
            code, _ = await outcome(drain(back).DrainWorker, DRAIN)
            assert code is grpc.StatusCode.NOT_FOUND
            stub = inference_pb2_grpc.InferenceServiceStub(back)
            code, _ = await outcome(stub.GetServerInfo, pb.GetServerInfoRequest())
            assert code is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await router.stop()


async def test_plain_tokens_may_generate_and_no_more(guarded: RouterConfig):
    router = Router(guarded, StaticDiscovery([]), no_workers())
    await router.start()
    try:
        assert await info(router.grpc_address, bearer("alpha-1")) == (OK, "")
        async with grpc.aio.insecure_channel(known(router.admin_address)) as back:
            drain = admin_pb2_grpc.AdminServiceStub(back).DrainWorker
            code, _ = await outcome(drain, DRAIN, metadata=bearer("alpha-1"))
            assert code is DENIED
    finally:
        await router.stop()


DRAIN = admin_pb2.DrainWorkerRequest(worker="decode-0")
SCALE = admin_pb2.ScaleWorkersRequest(prefill=2)


async def outcome(method: Any, request: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    """Of a call, or of a stream's first message."""
    call = method(request, timeout=5, **options)
    try:
        await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return OK, ""


async def test_a_new_file_of_tokens_holds_at_once(guarded: RouterConfig):
    """A token that is gone is refused, a new one is taken; what is open goes on."""
    path = known(guarded.auth_token_file)
    async with running(guarded, "prefill-0", "decode-0") as cluster:
        request = pb.GenerateRequest(text="x")
        call = cluster.stub.Generate(request, metadata=bearer("alpha-1"))
        submit = await cluster.prefill.submitted()

        other = path.with_name("other")
        other.write_text("gamma-3\n")
        other.replace(path)
        address = cluster.router.grpc_address
        async with asyncio.timeout(60):
            while await info(address, bearer("gamma-3")) != (OK, ""):
                await asyncio.sleep(0.05)
        assert (await info(address, bearer("alpha-1")))[0] is UNAUTHENTICATED
        end = worker_pb2.RequestEnd(reason=worker_pb2.RequestEnd.REASON_LENGTH)
        cluster.prefill.say(submit, 0, (4,), end=end)
        assert (await collect(call)).token_ids == [4]


def test_a_broken_new_file_keeps_the_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    tokens = CurrentTokens(path)
    for content, problem in (
        ("two words\n", "line 1 is not a token"),
        ("[[token]]\nname = 'alice'\nright = []\n", "token 1 (alice): right: is unknown"),
        (None, "No such file or directory"),
    ):
        caplog.clear()
        path.unlink()
        if content is not None:
            path.write_text(content)
        for _ in range(3):
            tokens.look()
        [error] = [one for one in caplog.records if one.levelname == "ERROR"]
        assert f"--auth-token-file: {path}: {problem}" in error.getMessage()
        assert tokens().find("alpha-1") is not None
        path.write_text(TOKENS)
        tokens.look()
    path.write_text("gamma-3\n")
    tokens.look()
    assert tokens().find("alpha-1") is None
    assert tokens().find("gamma-3") is not None
