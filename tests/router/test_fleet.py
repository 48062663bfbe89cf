"""Which workers get requests, as loads and what was sent change."""

from __future__ import annotations

from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb

from .cluster import Cluster, running
from .scripted_worker import END, load


async def report(cluster: Cluster, name: str, said: pb.WorkerLoad) -> None:
    """The worker's load, once the router knows it."""
    await cluster.report(next(one for one in cluster.workers if one.name == name), said)


async def test_requests_spread_by_what_was_sent_before_any_load_says_so(
    config: RouterConfig,
) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0", "decode-1") as cluster:
        calls = []
        for number in range(1, 5):
            calls.append(cluster.generate())
            for worker in cluster.workers[(number - 1) % 2 :: 2]:
                await worker.submitted((number + 1) // 2)
        assert [len(worker.submits) for worker in cluster.workers] == [2, 2, 2, 2]
        # What has begun leaves a prefill worker's backlog though its load has not changed.
        first = cluster.workers[1]
        for submit in first.submits:
            first.say(submit, 0, (4,), end=END(reason=END.REASON_HANDED_OVER))
        assert await calls[1].read()
        assert await calls[3].read()
        cluster.generate()
        await first.submitted(3)


async def test_requests_go_where_the_loads_say_that_there_is_room(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0", "decode-1") as cluster:
        cluster.count()
        prefills, decodes = cluster.workers[:2], cluster.workers[2:]
        for busy in (0, 1, 0):
            before = [len(worker.submits) for worker in cluster.workers]
            await report(cluster, f"prefill-{busy}", load(waiting_tokens=500))
            await report(cluster, f"decode-{busy}", load(free=3))
            await report(cluster, f"prefill-{1 - busy}", load())
            await report(cluster, f"decode-{1 - busy}", load())
            async for _ in cluster.generate():
                pass
            after = [len(worker.submits) for worker in (*prefills, *decodes)]
            got = [new - old for new, old in zip(after, before, strict=True)]
            assert got == ([0, 1, 0, 1] if busy == 0 else [1, 0, 1, 0])
