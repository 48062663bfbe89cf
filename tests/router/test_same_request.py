"""Requests with the id of another one: they join it, or are refused, or come after it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from pathlib import Path

import grpc
import pytest

from kvrelay.router.admission.validation import fingerprint
from kvrelay.router.config import RouterConfig
from kvrelay.router.requests.readers import MOST_READERS
from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, collect, running, status_of
from .scripted_worker import COUNTED, HANDED_OVER, LENGTH, until


async def test_a_retry_attaches_and_sees_everything(cluster: Cluster) -> None:
    first = cluster.generate(request_id="same")
    prefill, decode = await cluster.prefill.submitted(), await cluster.decode.submitted()
    cluster.prefill.say(prefill, 0, (50,), end=HANDED_OVER)
    assert (await first.read()).delta.token_ids == [50]
    second = cluster.generate(request_id="same")
    assert (await second.read()).delta.token_ids == [50]
    first.cancel()
    await asyncio.sleep(0.05)
    cluster.decode.say(decode, 1, (51,), end=LENGTH)
    assert (await second.read()).delta.token_ids == [51]
    assert (await second.read()).HasField("complete")
    assert len(cluster.prefill.submits) == len(cluster.decode.submits) == 1


async def test_another_body_under_a_live_id_is_refused(cluster: Cluster) -> None:
    first = cluster.generate(request_id="same")
    await cluster.decode.submitted()
    error = await status_of(cluster.generate(request_id="same", temperature=0.5))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert "request_id" in str(error.details())
    first.cancel()


async def test_an_id_can_be_used_again_while_workers_still_release_it(cluster: Cluster) -> None:
    first = cluster.generate(request_id="again")
    old = await cluster.prefill.submitted()
    cluster.prefill.say(old, 0, (50,), end=LENGTH)
    await collect(first)
    second = cluster.generate(request_id="again")
    new = await cluster.prefill.submitted(2)
    assert new.attempt > old.attempt
    cluster.prefill.say(new, 0, (60,), end=LENGTH)
    assert (await collect(second)).token_ids == [60]


async def test_a_retry_of_a_request_that_is_being_aborted_is_another_request(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort comes while the retry's body is compared with the first one's."""
    compared, let_go = threading.Event(), threading.Event()

    def hold(message: pb.GenerateRequest) -> bytes:
        compared.set()
        assert let_go.wait(60)
        return fingerprint(message)

    first = cluster.generate(request_id="again")
    await cluster.decode.submitted()
    monkeypatch.setattr("kvrelay.router.admission.admission.fingerprint", hold)
    second = asyncio.create_task(collect(cluster.generate(request_id="again")))
    await until(compared.is_set)
    assert (await cluster.stub.Abort(pb.AbortRequest(request_id="again"))).aborted
    assert (await collect(first)).token_ids == []
    cluster.count()
    let_go.set()
    assert (await second).token_ids == COUNTED


async def test_a_text_that_joins_a_live_request_is_not_tokenized_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = pb.GenerateRequest(request_id="shared", text="Hello world")
    first = cluster.stub.Generate(message)
    submit = await cluster.prefill.submitted()
    monkeypatch.setattr("kvrelay.router.admission.validation.Validator.validate", None)
    second = cluster.stub.Generate(message)
    other = cluster.stub.Generate(pb.GenerateRequest(request_id="shared", text="Hello"))
    assert (await status_of(other)).code() == grpc.StatusCode.ALREADY_EXISTS
    reads = [asyncio.create_task(collect(call)) for call in (first, second)]
    cluster.prefill.say(submit, 0, (50,), end=LENGTH)
    assert [streamed.token_ids for streamed in await asyncio.gather(*reads)] == [[50], [50]]


async def test_another_router_with_the_same_key_makes_the_same_seed(
    config: RouterConfig, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_text("one secret for all routers")
    seeds = []
    for key in (path, path, None):
        own = dataclasses.replace(config, seed_key_file=key)
        async with running(own, "prefill-0", "decode-0") as cluster:
            cluster.count()
            for request_id in ("same", "same", "other"):
                complete = (await collect(cluster.generate(request_id=request_id))).complete
                assert complete is not None
                seeds.append(complete.seed)
            sent = [submit.sampling_params.seed for submit in cluster.decode.submits]
            assert sent == seeds[-3:]
    first, second, third = seeds[:3], seeds[3:6], seeds[6:]
    assert first == second
    assert first[0] == first[1] != first[2]
    assert not set(first) & set(third)


async def test_a_request_has_few_readers(cluster: Cluster) -> None:
    """Each costs as much as another request, and takes no place among the live ones."""
    calls = [cluster.generate(request_id="same")]
    prefill, _ = await cluster.prefill.submitted(), await cluster.decode.submitted()
    cluster.prefill.say(prefill, 0, (50,), end=HANDED_OVER)
    calls += [cluster.generate(request_id="same") for _ in range(MOST_READERS - 1)]
    for call in calls:
        assert (await call.read()).delta.token_ids == [50]
    error = await status_of(cluster.generate(request_id="same"))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    calls[0].cancel()
    async with asyncio.timeout(60):
        while True:
            late = cluster.generate(request_id="same")
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert (await late.read()).delta.token_ids == [50]
                break
    for call in (*calls, late):
        call.cancel()
