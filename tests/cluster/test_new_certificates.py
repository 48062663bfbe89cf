"""Certificates are replaced while workers and a router run: nothing is restarted for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from kvrelay.engine.config import WorkerConfig
from kvrelay.net import tls
from kvrelay.net.channels import worker_credentials
from kvrelay.net.tls import TlsFiles
from kvrelay.prefill_worker.worker import build
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from kvrelay.wire.worker_info import WorkerRole
from tests.certificates import Authority, open_channel
from tests.cluster.in_process import in_process
from tests.cluster.running import Cluster


async def test_old_workers_and_new_ones_know_each_other(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the new certificates are another authority's."""
    monkeypatch.setattr(tls, "_LOOK_SECONDS", 0.0)
    old, new = (Authority(tmp_path / name, name).issue() for name in ("old", "new"))
    files = TlsFiles(
        tmp_path / old.cert.name, tmp_path / old.key.name, tmp_path / old.paths[2].name
    )
    copy_files(old, files)
    async with in_process(tiny, tls=files, kv_memory=8 << 20) as cluster:
        before = await cluster.generate(range(3, 40), max_tokens=6, temperature=0)
        decode = cluster.workers[1]
        assert await reaches(decode.address, old)
        copy_files(new, files)
        assert not await reaches(decode.address, old)
        assert await reaches(decode.address, new)

        config = WorkerConfig(
            "prefill-1", WorkerRole.PREFILL, tiny, "tiny", dtype="float32", tls=files
        )
        successor = build(config)
        info = await successor.start()
        try:
            cluster.discovery.replace([info, decode])
            await until_ready(cluster, "prefill-1")
            after = await cluster.generate(range(3, 40), max_tokens=6, temperature=0)
            assert after.tokens == before.tokens
            await cluster.assert_at_baseline()
        finally:
            cluster.discovery.replace(cluster.workers)
            await successor.stop()


async def until_ready(cluster: Cluster, worker: str) -> None:
    async with asyncio.timeout(30):
        while worker not in [one.worker for one in await cluster.status() if one.ready]:
            await asyncio.sleep(0.02)


def copy_files(source: TlsFiles, target: TlsFiles) -> None:
    for path, copy in zip(source.paths, target.paths, strict=True):
        copy.write_bytes(path.read_bytes())


async def reaches(address: str, files: TlsFiles) -> bool:
    """Whether a process with these certificates can ask a worker for its pages."""
    async with open_channel(address, worker_credentials(files)) as channel:
        ask = worker_pb2_grpc.WorkerServiceStub(channel).GetPageOwners
        try:
            await ask(worker_pb2.GetPageOwnersRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    return True
