"""A real router sends prompts to the workers that said, or are expected, to have their prefixes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvrelay.router.config import PlacementMode, RouterConfig
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from kvrelay.wire.page_hash import PageHashes

from .cluster import Cluster, collect, running
from .scripted_worker import END, ScriptedWorker, broken, count_prefill, load, until

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


async def generate(cluster: Cluster, salt: str = "", **params: Any) -> tuple[str, str]:
    """A request with the prompt; returns who computed it and who generated."""
    before = [len(worker.submits) for worker in cluster.workers]
    request = pb.GenerateRequest(
        input_ids=pb.TokenIds(ids=PROMPT),
        sampling_params=pb.SamplingParams(max_tokens=4, **params),
        cache_salt=salt,
    )
    streamed = await collect(cluster.stub.Generate(request))
    assert len(streamed.token_ids) == 4
    took = [w.name for w, n in zip(cluster.workers, before, strict=True) if len(w.submits) > n]
    return took[0], took[-1]


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


async def test_who_has_a_prompt_that_is_to_be_scored_is_not_preferred_to_compute_it(
    pairs: Cluster,
) -> None:
    for worker in pairs.workers:
        if worker.name.endswith("1"):
            tell(worker, 1)
    await told(pairs, 6)
    assert await generate(pairs, prompt_logprobs=1) == ("prefill-0", "decode-1")
    last = {worker.name: worker.submits[-1].cached_tokens for worker in pairs.workers[::3]}
    assert last == {"prefill-0": 0, "decode-1": 192}
    assert await pairs.metric("kvrelay_expected_hit_tokens_total") == 192
    assert await generate(pairs, salt="other", prompt_logprobs=1) == ("prefill-0", "decode-0")


async def test_of_a_prompt_that_is_computed_alone_nothing_counts_as_cached(pairs: Cluster) -> None:
    alone: list[tuple[str, bool, int]] = []

    async def fail_first(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        alone.append((worker.name, submit.alone, submit.cached_tokens))
        if len(alone) == 1:
            worker.say(submit, end=broken(END.CAUSE_FORWARD_FAILED))
        else:
            await count_prefill(worker, submit)

    for worker in pairs.workers[:2]:
        worker.on_submit = fail_first
        tell(worker, 1)
    await told(pairs, 6)
    await generate(pairs)
    assert alone == [("prefill-0", False, 192), ("prefill-1", True, 0)]


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


@pytest.mark.parametrize("placement", PlacementMode)
async def test_what_a_prefill_worker_may_read_of_a_conversation_is_not_in_its_queue(
    config: RouterConfig, placement: PlacementMode
) -> None:
    """The decode worker has the prompt and its answer of before, without any session."""
    mode = replace(config, placement=placement)
    async with running(mode, "prefill-0", "decode-0") as cluster:
        cluster.count()
        tell(cluster.prefill, 0, begins=True)
        tell(cluster.decode, 0, begins=True)
        tell(cluster.decode, 1)
        speeds = pb.StepSpeeds(
            seconds_per_step=0.01, seconds_per_token=0.001, prompts_known=True, rows_known=True
        )
        peer = pb.PeerTransfer(
            incarnation=cluster.prefill.incarnation, lent_tokens_per_second=1_000_000
        )
        for worker in cluster.workers:
            busy = load()
            busy.MergeFrom(pb.WorkerLoad(running_requests=8, growth_tokens=800, speeds=speeds))
            worker.send(worker_pb2.AttachResponse(load=busy, peers=[peer]))
        links, prefixes = cluster.router._fleet.links, cluster.router._fleet.prefixes
        await until(lambda: all(link.load.running_requests == 8 for link in links))
        await until(lambda: prefixes.num_entries == 3)
        await generate(cluster)
        [submit] = cluster.prefill.submits
        assert submit.cached_tokens == 192
