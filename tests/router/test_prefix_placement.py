"""A real router sends prompts to the workers that said, or are expected, to have their prefixes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from kvrelay.wire.page_hash import PageHashes

from .cluster import Cluster, collect, running
from .scripted_worker import ScriptedWorker, until

PAGE_SIZE = 16
PROMPT = [5] * 200


@pytest.fixture
async def pairs(config: RouterConfig) -> AsyncIterator[Cluster]:
    """Two pairs; all workers tell that they have no prefixes yet."""
    async with running(config, "prefill-0", "prefill-1", "decode-0", "decode-1") as cluster:
        cluster.count()
        for worker in cluster.workers:
            tell(worker, 0, begins=True)
        await told(cluster, 0)
        yield cluster


def tell(worker: ScriptedWorker, number: int, *, begins: bool = False, salt: str = "") -> None:
    """The worker says that it has the prompt, unless it has just begun."""
    stored = () if begins else PageHashes(worker.model, PAGE_SIZE).marks_of(PROMPT, f"/{salt}")
    update = worker_pb2.PrefixUpdate(
        number=number, page_size=PAGE_SIZE, begins=begins, stored=stored
    )
    worker.send(worker_pb2.AttachResponse(prefixes=update))


async def told(cluster: Cluster, entries: int) -> None:
    """Returns once the router knows so many entries, and of all workers that they tell."""
    prefixes = cluster.router._fleet.prefixes
    await until(lambda: prefixes.num_entries == entries and len(prefixes._workers) == 4)


async def generate(cluster: Cluster, salt: str = "") -> tuple[str, str]:
    """A request with the prompt; returns who computed it and who generated."""
    before = [len(worker.submits) for worker in cluster.workers]
    request = pb.GenerateRequest(
        input_ids=pb.TokenIds(ids=PROMPT),
        sampling_params=pb.SamplingParams(max_tokens=4),
        cache_salt=salt,
    )
    streamed = await collect(cluster.stub.Generate(request))
    assert len(streamed.token_ids) == 4
    took = [w.name for w, n in zip(cluster.workers, before, strict=True) if len(w.submits) > n]
    prefill, decode = took
    return prefill, decode


async def test_a_prompt_goes_where_its_prefix_was_told_to_be(pairs: Cluster) -> None:
    assert await generate(pairs) == ("prefill-0", "decode-0")
    for worker in pairs.workers:
        if worker.name.endswith("1"):
            tell(worker, 1)
    await told(pairs, 6)
    assert await generate(pairs) == ("prefill-1", "decode-1")
    last = [worker.submits[-1].cached_tokens for worker in pairs.workers]
    assert last == [0, 192, 0, 192]
    assert await pairs.metric("kvrelay_expected_hit_tokens_total") == 2 * 192
    assert await pairs.metric("kvrelay_prefix_entries") == 6


async def test_what_another_salt_has_attracts_nobody(pairs: Cluster) -> None:
    for worker in pairs.workers:
        if worker.name.endswith("1"):
            tell(worker, 1, salt="other")
    await told(pairs, 6)
    assert await generate(pairs) == ("prefill-0", "decode-0")
    assert await generate(pairs, salt="other") == ("prefill-1", "decode-1")


async def test_a_worker_that_comes_back_is_known_by_what_it_tells_then(pairs: Cluster) -> None:
    workers = {worker.name: worker for worker in pairs.workers}
    tell(workers["prefill-1"], 1)
    await told(pairs, 3)
    workers["prefill-1"].break_stream()
    prefixes = pairs.router._fleet.prefixes
    await until(lambda: prefixes.num_entries == 0)
    await until(lambda: len(workers["prefill-1"].hellos) == 2)
    tell(workers["prefill-1"], 0, begins=True)
    tell(workers["prefill-1"], 1)
    await told(pairs, 3)
    assert (await generate(pairs))[0] == "prefill-1"
