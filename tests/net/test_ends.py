"""Which channels can connect to a worker's listener; the server has only a health service."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.net import tls
from kvrelay.net.channels import bind, worker_credentials, worker_server
from kvrelay.net.health_service import HealthService
from kvrelay.net.tls import CurrentTls, TlsFiles
from tests.certificates import Authority, open_channel
from tests.known import known

REFUSED = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.issue()


@asynccontextmanager
async def listening(files: TlsFiles | None) -> AsyncIterator[str]:
    server = worker_server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(), server)
    port = bind(server, "127.0.0.1:0", files)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(address: str, credentials: Any) -> grpc.StatusCode:
    async with open_channel(address, credentials) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_certificates_of_one_authority_reach_each_other(
    authority: Authority, files: TlsFiles
):
    async with listening(files) as address:
        assert await call(address, worker_credentials(files)) is grpc.StatusCode.OK
        other = authority.issue("other")
        assert await call(address, worker_credentials(other)) is grpc.StatusCode.OK


async def test_a_worker_refuses_who_has_no_certificate(files: TlsFiles):
    assert files.ca is not None
    async with listening(files) as address:
        bare = grpc.ssl_channel_credentials(files.ca.read_bytes())
        assert await call(address, bare) is REFUSED


async def test_a_worker_refuses_another_authoritys_certificate(files: TlsFiles, tmp_path: Path):
    stranger = Authority(tmp_path, "stranger").issue()
    async with listening(files) as address:
        # It takes the worker's certificate, so that it is the worker who refuses.
        credentials = worker_credentials(replace(stranger, ca=files.ca))
        assert await call(address, credentials) is REFUSED


async def test_a_worker_refuses_plain_text(files: TlsFiles):
    async with listening(files) as address:
        assert await call(address, None) is REFUSED


async def test_another_authoritys_worker_is_refused(files: TlsFiles, tmp_path: Path):
    stranger = Authority(tmp_path, "stranger").issue()
    async with listening(replace(stranger, ca=files.ca)) as address:
        assert await call(address, worker_credentials(files)) is REFUSED


async def test_a_worker_of_another_name_is_refused(authority: Authority, files: TlsFiles):
    async with listening(authority.issue("elsewhere", host="worker.example")) as address:
        assert await call(address, worker_credentials(files)) is REFUSED


async def test_a_name_of_their_own_is_what_workers_are_checked_against(authority: Authority):
    """So one certificate does for workers at any address."""
    files = replace(authority.issue("named", host="worker.kv"), name="worker.kv")
    async with listening(files) as address:
        assert await call(address, CurrentTls(files)) is grpc.StatusCode.OK
        another = CurrentTls(replace(files, name="another.kv"))
        assert await call(address, another) is grpc.StatusCode.UNAVAILABLE


async def test_without_files_it_is_plain_text(files: TlsFiles):
    async with listening(None) as address:
        assert await call(address, None) is grpc.StatusCode.OK
        assert await call(address, worker_credentials(files)) is REFUSED


@pytest.mark.parametrize("secure", [False, True])
async def test_a_port_in_use_is_said(files: TlsFiles, secure: bool):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {taken}: is the port in use"):
            bind(worker_server(), taken, files if secure else None)


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are looked at whenever they are used."""
    monkeypatch.setattr(tls, "_LOOK_SECONDS", 0.0)


def replace_files(old: TlsFiles, new: TlsFiles) -> None:
    """Put what `new` has into the files of `old`."""
    for there, here in zip(old.paths, new.paths, strict=True):
        there.write_bytes(here.read_bytes())


@pytest.fixture
def changing(tmp_path: Path) -> TlsFiles:
    return Authority(tmp_path / "changing").issue()


async def test_new_files_hold_for_new_connections(
    files: TlsFiles, changing: TlsFiles, looks_always: None
):
    """Of listener and channel: what they show, and whom they trust."""
    both = CurrentTls(changing)
    async with (
        listening(changing) as address,
        open_channel(address, worker_credentials(changing)) as early,
    ):
        check = health_pb2_grpc.HealthStub(early).Check
        await check(health_pb2.HealthCheckRequest())
        assert await call(address, both) is grpc.StatusCode.OK
        assert await call(address, worker_credentials(files)) is REFUSED

        replace_files(changing, files)
        assert await call(address, worker_credentials(files)) is grpc.StatusCode.OK
        assert await call(address, both) is grpc.StatusCode.OK
        await check(health_pb2.HealthCheckRequest())  # an open connection goes on


async def test_broken_new_files_change_nothing(
    files: TlsFiles, changing: TlsFiles, looks_always: None, caplog: pytest.LogCaptureFixture
):
    both = CurrentTls(changing)
    ca = known(changing.ca)
    async with listening(changing) as address:
        for path, content, problem in (
            (changing.key, files.key.read_bytes(), f"is not the key of {changing.cert}"),
            (changing.key, b"", "contains no PEM private key"),
            (ca, b"nothing", "contains no PEM certificate"),
            (ca, None, "No such file or directory"),
        ):
            before = path.read_bytes()
            caplog.clear()
            put(path, content)
            assert await call(address, both) is grpc.StatusCode.OK
            assert await call(address, both) is grpc.StatusCode.OK
            errors = [one for one in caplog.records if one.levelname == "ERROR"]
            assert len(errors) == 2, "once for the listener, once for the channel"
            for error in errors:
                message = error.getMessage()
                assert message.startswith("TLS: the certificates stay as they were: ")
                assert f"{path}: {problem}" in message
            put(path, before)
            assert await call(address, both) is grpc.StatusCode.OK


def put(path: Path, content: bytes | None) -> None:
    """Change a file at once, or remove it: a late look finds no half of a change."""
    if content is None:
        path.unlink()
    else:
        new = path.with_suffix(".new")
        new.write_bytes(content)
        new.replace(path)


async def test_the_files_are_not_read_for_every_connection(
    changing: TlsFiles, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tls, "_LOOK_SECONDS", 3600.0)
    async with listening(changing) as address:
        both = CurrentTls(changing)
        replace_files(changing, files)
        assert await call(address, both) is grpc.StatusCode.OK
        assert await call(address, worker_credentials(files)) is REFUSED
