"""Workers that have loaded another model than the served one are listed, and get no requests."""

from __future__ import annotations

import logging
from dataclasses import replace

import grpc
import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.errors import StartError
from kvrelay.router.router import Router
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.model_digest import NO_MODEL, ModelDigest
from kvrelay.wire.version import VERSION

from .cluster import Cluster, collect, read, running, status_of
from .scripted_worker import ScriptedWorker, until

TRAINED = "7e" * 32


async def restart(cluster: Cluster, worker: ScriptedWorker, model: ModelDigest) -> None:
    """The worker comes back as another incarnation, which has loaded `model`."""
    await worker.stop()
    number = int(worker.incarnation.rpartition("-")[2]) + 1
    worker.incarnation, worker.model = f"{worker.name}-{number}", model
    await worker.start()
    cluster.list_workers()
    await until(lambda: worker.hellos[-1].incarnation == worker.incarnation)


async def status(cluster: Cluster) -> tuple[str, dict[str, pb.WorkerStatus]]:
    """The served model, and each worker's status."""
    info = await cluster.stub.GetServerInfo(pb.GetServerInfoRequest())
    return info.model_digest, {worker.worker: worker for worker in info.workers}


async def test_a_worker_of_another_model_is_refused_and_both_are_named(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        odd = cluster.workers[1]
        served = odd.model
        trained = replace(served, weights=TRAINED)
        with caplog.at_level(logging.ERROR):
            await restart(cluster, odd, trained)
        for _ in range(4):
            assert len((await collect(cluster.generate())).token_ids) == 8
        assert odd.submits == []
        why = (
            f"prefill-1-2 has loaded model {trained.name}, not {served.name}, which is served: "
            "weights (7e7e7e7e7e7e, not none)"
        )
        name, workers = await status(cluster)
        assert name == served.name
        assert (workers["prefill-1"].model_digest, workers["prefill-1"].refusal) == (
            trained.name,
            why,
        )
        assert (workers["prefill-0"].model_digest, workers["prefill-0"].refusal) == (
            served.name,
            "",
        )
        # What an HTTP server of another test says, whose clients have left, is not ours.
        ours = [entry.getMessage() for entry in caplog.records if entry.name.startswith("kvrelay")]
        assert ours == [f"{why}. It gets no requests"]
        assert await cluster.metric("kvrelay_workers_refused") == 1
        await restart(cluster, odd, served)
        assert (await status(cluster))[1]["prefill-1"].refusal == ""
        assert await cluster.metric("kvrelay_workers_refused") == 0


async def test_a_worker_of_another_version_is_refused_and_both_are_named(
    config: RouterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        odd = cluster.workers[1]
        for version, called in (("0.0.9 (0123abcd)",) * 2, ("", "an earlier version")):
            odd.version = version
            caplog.clear()
            # Its model would be served if it were asked.
            await restart(cluster, odd, replace(odd.model, weights=TRAINED))
            for _ in range(4):
                assert len((await collect(cluster.generate())).token_ids) == 8
            assert odd.submits == []
            why = f"{odd.incarnation} is of {called}, this router of {VERSION}"
            name, workers = await status(cluster)
            assert name == cluster.decode.model.name
            assert workers["prefill-1"].refusal == why
            assert f"{why}. It gets no requests" in caplog.messages


async def test_without_any_other_worker_requests_are_told_why(cluster: Cluster) -> None:
    cluster.count()
    served = cluster.prefill.model
    await restart(cluster, cluster.prefill, replace(served, config=TRAINED))
    error = await status_of(cluster.generate())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    details = error.details()
    assert details is not None
    assert "prefill-0-2 has loaded model" in details
    assert "config (7e7e7e7e7e7e, not none)" in details
    assert cluster.prefill.submits == []


async def test_a_tokenizer_that_is_not_the_routers_is_refused(cluster: Cluster) -> None:
    served = cluster.decode.model
    await restart(cluster, cluster.decode, replace(served, tokenizer=TRAINED))
    refusal = (await status(cluster))[1]["decode-0"].refusal
    own = served.tokenizer[:12]
    assert refusal.endswith(f"whose tokenizer (7e7e7e7e7e7e) is not the router's ({own})")


async def test_the_model_changes_once_no_worker_has_the_old_one(cluster: Cluster) -> None:
    cluster.count()
    served = cluster.decode.model
    trained = replace(served, weights=TRAINED)
    await restart(cluster, cluster.prefill, trained)
    assert (await status(cluster))[0] == served.name
    decode = cluster.decode.endpoint
    cluster.discovery.replace([cluster.prefill.endpoint], awaited=[decode])
    assert (await status(cluster))[0] == served.name, "one is being replaced"
    cluster.discovery.replace([cluster.prefill.endpoint, replace(decode, draining=True)])
    assert (await status(cluster))[0] == served.name, "one drains"
    await restart(cluster, cluster.decode, trained)
    name, workers = await status(cluster)
    assert name == trained.name
    assert [worker.refusal for worker in workers.values()] == ["", ""]
    assert len((await collect(cluster.generate())).token_ids) == 8


async def test_a_stream_does_not_go_on_with_another_model(cluster: Cluster) -> None:
    call = cluster.generate(request_id="a")
    submit = await cluster.prefill.submitted()
    cluster.prefill.say(submit, 0, (7,))
    assert await read(call, 1) == [(0, 7)]
    began = cluster.decode.model
    trained = replace(began, weights=TRAINED)
    for worker in cluster.workers:
        await worker.stop()
    cluster.discovery.replace([])
    cluster.count()
    for worker in cluster.workers:
        worker.incarnation, worker.model = f"{worker.name}-2", trained
        await worker.start()
    cluster.list_workers()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    error = caught.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    expected = f"it began with model {began.name}, in whose place {trained.name} is served now"
    assert error.details() == expected
    assert len((await collect(cluster.generate(request_id="b"))).token_ids) == 8


async def test_workers_that_differ_at_the_start_are_an_error(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "decode-0") as cluster:
        odd = replace(cluster.prefill.endpoint, model=replace(NO_MODEL, tokenizer=TRAINED))
        router = Router(config, StaticDiscovery([cluster.decode.endpoint, odd]))
        await router.start()
        with pytest.raises(StartError, match=r"^prefill-0-1 has loaded model .* tokenizer"):
            await router.wait_ready()
        await router.stop()
