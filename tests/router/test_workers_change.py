"""Workers that come and go, and what they say too late."""

from __future__ import annotations

import asyncio

import grpc

from kvrelay.v1 import worker_pb2

from .cluster import Cluster, collect, status_of
from .scripted_worker import LENGTH, SECONDS, until


async def test_a_broken_stream_is_taken_up_again(cluster: Cluster) -> None:
    cluster.decode.break_stream()
    await until(lambda: len(cluster.decode.hellos) == 2)
    await asyncio.wait_for(cluster.router.wait_ready(), SECONDS)
    cluster.count()
    assert len((await collect(cluster.generate())).token_ids) == 8
    assert len({hello.router for hello in cluster.decode.hellos}) == 1


async def test_another_incarnation_is_attached_only_once_it_is_listed(cluster: Cluster) -> None:
    await cluster.decode.stop()
    cluster.decode.incarnation = "decode-0-2"
    await cluster.decode.start()
    await until(lambda: len(cluster.decode.hellos) >= 2)
    assert cluster.decode.hellos[-1].incarnation == "decode-0-1"
    assert (await status_of(cluster.generate())).code() == grpc.StatusCode.UNAVAILABLE
    cluster.discovery.replace([cluster.prefill.endpoint, cluster.decode.endpoint])
    await asyncio.wait_for(cluster.router.wait_ready(), SECONDS)
    cluster.count()
    assert len((await collect(cluster.generate())).token_ids) == 8


async def test_a_worker_off_the_list_is_let_go_of(cluster: Cluster) -> None:
    call = cluster.generate()
    await asyncio.gather(cluster.decode.submitted(), cluster.prefill.submitted())
    cluster.discovery.replace([cluster.prefill.endpoint])
    assert (await status_of(call)).code() == grpc.StatusCode.UNAVAILABLE
    await until(lambda: len(cluster.prefill.cancels) == 1)
    await asyncio.sleep(0.3)
    assert len(cluster.decode.hellos) == 1


async def test_outputs_of_no_attempt_are_dropped_and_counted(cluster: Cluster) -> None:
    call = cluster.generate(request_id="now")
    submit = await cluster.prefill.submitted()
    old = worker_pb2.CancelRequest(request_id="now", attempt=submit.attempt + 1)
    cluster.prefill.say(old, 0, (99,))
    cluster.prefill.say(worker_pb2.CancelRequest(request_id="no", attempt=1), 0, (99,))
    cluster.prefill.say(submit, 0, (50,), end=LENGTH)
    assert (await collect(call)).token_ids == [50]
    assert await cluster.metric("kvrelay_stale_outputs_total") == 2
