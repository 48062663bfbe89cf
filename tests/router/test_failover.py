"""A stream goes on after its memory was taken or its worker was lost."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvrelay.router.config import RouterConfig
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from kvrelay.wire.worker_info import WorkerRole

from .cluster import Cluster, collect, read, running, status_of
from .scripted_worker import (
    END,
    Answer,
    ScriptedWorker,
    check_emitted,
    choices_of,
    count_decode,
    count_prefill,
    emitted_by,
    load,
    say_counted,
    until,
)

HANDED_OVER = END(reason=END.REASON_HANDED_OVER)
LENGTH = END(reason=END.REASON_LENGTH)
RETRACTED = END(reason=END.REASON_RETRACTED)
BROKEN = END(reason=END.REASON_FAILED, error="pull: broken", cause=END.CAUSE_FAILED)
COUNTED = [4, 5, 6, 7, 8, 9, 10, 11]


def retract_after(*tokens: int, choice: int = 0) -> Answer:
    """A decode worker that retracts a choice after so many tokens, once for each number."""
    left = list(tokens)

    async def on_submit(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
        if choice not in choices_of(submit) or not left:
            return await count_decode(worker, submit)
        first = check_emitted(worker, submit) + 1
        stop, number = first + left.pop(0), submit.sampling_params.max_tokens
        for position in range(first, number):
            for one in choices_of(submit):
                if one == choice and position == stop:
                    worker.say(submit, position, choice=one, end=RETRACTED)
                else:  # not said of one that has ended
                    say_counted(worker, submit, position, one)
            await asyncio.sleep(0.001)
        return None

    return on_submit


async def tokens_then_silence(worker: ScriptedWorker, submit: worker_pb2.SubmitRequest) -> None:
    """A decode worker that is going to be lost."""
    first = check_emitted(worker, submit) + 1
    for position in (first, first + 1):
        for choice in choices_of(submit):
            say_counted(worker, submit, position, choice)


async def stale(cluster: Cluster) -> float:
    return await cluster.metric('kvrelay_stale_outputs_total{model="counter"}')


# Retraction.


async def test_a_retracted_stream_goes_on_where_it_was(cluster: Cluster) -> None:
    cluster.count()
    cluster.decode.on_submit = retract_after(3)
    streamed = await collect(
        cluster.generate(seed=11, temperature=0.5, stop=["never"], min_tokens=2, logprobs=1)
    )
    assert streamed.token_ids == COUNTED
    assert streamed.complete is not None
    assert streamed.complete.finish_reason == pb.FINISH_REASON_LENGTH
    usage = streamed.complete.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 8)
    for worker in (cluster.prefill, cluster.decode):
        first, second = worker.submits
        assert second.attempt > first.attempt
        assert list(second.input_ids) == [1, 2, 3, 4, 5, 6, 7]
        assert (second.num_prompt_tokens, second.first_choice) == (3, 0)
        assert second.sampling_params == first.sampling_params
        assert second.age_seconds > first.age_seconds
        assert worker.cancels == []
    assert cluster.decode.submits[1].prefill == cluster.decode.submits[0].prefill
    assert await cluster.resubmitted("retracted") == 1
    assert await stale(cluster) == 0


async def test_retractions_in_a_row_use_up_no_attempts(cluster: Cluster) -> None:
    cluster.count()
    # More than `max_attempts`, and some before the attempt said anything new but the first token.
    cluster.decode.on_submit = retract_after(1, 0, 0, 1, 0)
    assert (await collect(cluster.generate())).token_ids == COUNTED
    emitted = [len(emitted_by(submit)) for submit in cluster.decode.submits]
    assert emitted == [0, 2, 3, 4, 6, 7][: len(emitted)]
    assert len(emitted) == 6
    assert await cluster.resubmitted() == await cluster.resubmitted("retracted") == 5


async def test_one_of_three_choices_is_retracted(cluster: Cluster) -> None:
    cluster.count()
    cluster.decode.on_submit = retract_after(2, choice=1)
    streamed = await collect(cluster.generate(n=3, prompt_logprobs=0))
    for choice in range(3):
        first = 4 + 50 * choice
        assert streamed.token_ids_of(choice) == list(range(first, first + 8))
    _, second = cluster.decode.submits
    assert (second.first_choice, second.sampling_params.n) == (1, 1)
    assert emitted_by(second) == [54, 55, 56]
    assert streamed.complete is not None
    assert streamed.complete.usage.completion_tokens == 24


async def test_prompt_logprobs_are_asked_for_until_they_are_here(cluster: Cluster) -> None:
    call = cluster.generate(prompt_logprobs=2, max_tokens=4)
    first = await cluster.prefill.submitted()
    logprobs = [pb.TokenLogprobs(token_id=t, logprob=-0.5) for t in (2, 3)]
    cluster.prefill.say(first, prompt_logprobs=logprobs[:1], prompt_index=1)
    cluster.prefill.say(first, end=BROKEN)
    second = await cluster.prefill.submitted(2)
    assert second.sampling_params.prompt_logprobs == 2
    cluster.prefill.say(second, prompt_logprobs=logprobs, prompt_index=1)
    cluster.prefill.say(second, 0, (4,), end=HANDED_OVER)
    cluster.decode.say(await cluster.decode.submitted(2), 1, end=RETRACTED)
    third = await cluster.prefill.submitted(3)
    assert not third.sampling_params.HasField("prompt_logprobs")
    cluster.prefill.say(third, 1, (5,), end=LENGTH)
    streamed = await collect(call)
    assert [list(delta.prompt_logprobs) for delta in streamed.deltas] == [
        logprobs[:1],
        logprobs[1:],
        [],
        [],
    ]


async def test_cached_tokens_are_those_of_the_first_attempt(cluster: Cluster) -> None:
    call = cluster.generate()
    prefill = await cluster.prefill.submitted()
    cluster.prefill.say(prefill, 0, (4,), end=HANDED_OVER, cached_tokens=1)
    cluster.decode.say(await cluster.decode.submitted(), 1, end=RETRACTED)
    prefill = await cluster.prefill.submitted(2)
    cluster.prefill.say(prefill, 1, (5,), end=LENGTH, cached_tokens=3)
    complete = (await collect(call)).complete
    assert complete is not None
    assert complete.usage.cached_tokens == 1


@pytest.mark.parametrize("choices", [1, 2])
async def test_late_output_of_an_old_attempt_is_dropped_and_counted(
    cluster: Cluster, choices: int
) -> None:
    """The attempt is over, or goes on with another choice."""
    call = cluster.generate(n=choices)
    prefill, decode = await cluster.prefill.submitted(), await cluster.decode.submitted()
    for choice in range(choices):
        cluster.prefill.say(prefill, 0, (4,), choice=choice, end=HANDED_OVER)
    cluster.decode.say(decode, 1, end=RETRACTED)
    cluster.decode.say_late(decode, 1, (99,))
    cluster.decode.say_late(decode, 2, (98,), end=LENGTH)
    await cluster.prefill.submitted(2)
    cluster.prefill.say(cluster.prefill.submits[1], 1, (5,), end=LENGTH)
    for choice in range(1, choices):
        cluster.decode.say(decode, 1, (55,), choice=choice, end=LENGTH)
    streamed = await collect(call)
    assert streamed.token_ids == [4, 5]
    assert await stale(cluster) == 2


async def test_a_token_that_was_streamed_stays_whatever_a_later_attempt_says(
    cluster: Cluster,
) -> None:
    call = cluster.generate()
    cluster.prefill.say(await cluster.prefill.submitted(), 0, (4,), end=HANDED_OVER)
    decode = await cluster.decode.submitted()
    cluster.decode.say(decode, 1, (5, 6))
    cluster.decode.say(decode, 3, end=RETRACTED)
    again = await cluster.prefill.submitted(2)
    cluster.prefill.say(again, 1, (99, 6, 7), end=LENGTH)
    assert (await collect(call)).token_ids == [4, 5, 6, 7]
    assert await cluster.metric('kvrelay_contradicted_tokens_total{model="counter"}') == 1


# Failover.


@pytest.fixture
def patient(config: RouterConfig) -> RouterConfig:
    return dataclasses.replace(config, failover_wait=5.0)


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_decode_worker_lost_in_mid_stream_is_not_noticed(
    config: RouterConfig, choices: int
) -> None:
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        cluster.count()
        cluster.decode.on_submit = tokens_then_silence
        call = cluster.generate(n=choices)
        streamed = await read(call, 3 * choices)
        await cluster.decode.stop()
        streamed += await read(call)
    for choice in range(choices):
        first = 4 + 50 * choice
        assert [t for c, t in streamed if c == choice] == list(range(first, first + 8))
    assert [len(worker.submits) for worker in cluster.workers] == [1 + choices, 1, choices]


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_prefill_worker_lost_before_the_hand_over_is_not_noticed(
    config: RouterConfig, choices: int
) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        cluster.prefill.on_submit = None
        cluster.decode.on_submit = None
        call = cluster.generate(n=choices)
        old = await cluster.decode.submitted()
        await cluster.prefill.submitted()
        cluster.decode.on_submit = count_decode
        await cluster.prefill.stop()
        streamed = await collect(call)
        for choice in range(choices):
            first = 4 + 50 * choice
            assert streamed.token_ids_of(choice) == list(range(first, first + 8))
        # Nothing had come, so all choices go on together; and the decode side was told.
        assert cluster.decode.submits[1].sampling_params.n == choices
        assert [cancel.attempt for cancel in cluster.decode.cancels] == [old.attempt]


async def test_what_overtook_a_lost_first_token_is_computed_again(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "prefill-1", "decode-0") as cluster:
        cluster.count()
        cluster.prefill.on_submit = None
        cluster.decode.on_submit = None
        call = cluster.generate()
        old = await cluster.decode.submitted()
        cluster.decode.say(old, 1, (99,), end=LENGTH)
        cluster.decode.on_submit = count_decode
        await cluster.prefill.submitted()
        await cluster.prefill.stop()
        assert (await collect(call)).token_ids == COUNTED


async def test_a_restarted_worker_is_waited_for(patient: RouterConfig) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        cluster.count()
        cluster.decode.on_submit = tokens_then_silence
        call = cluster.generate()
        streamed = await read(call, 3)
        await cluster.decode.stop()
        await asyncio.sleep(0.3)
        cluster.decode.incarnation = "decode-0-2"
        cluster.decode.on_submit = count_decode
        await cluster.decode.start()
        cluster.list_workers()
        streamed += await read(call)
        assert [token for _, token in streamed] == COUNTED
        assert await cluster.resubmitted("worker_lost") == 1


async def test_an_abort_during_that_wait_is_the_end(patient: RouterConfig) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        call = cluster.generate(request_id="ab")
        await asyncio.gather(cluster.prefill.submitted(), cluster.decode.submitted())
        await cluster.decode.stop()
        await until(lambda: len(cluster.prefill.cancels) == 1)
        await asyncio.sleep(0.1)
        assert (await cluster.stub.Abort(pb.AbortRequest(request_id="ab"))).aborted
        assert (await call.read()).complete.finish_reason == pb.FINISH_REASON_ABORT
        await cluster.decode.start()
        await asyncio.wait_for(cluster.router.wait_ready(), 5)
        await asyncio.sleep(0.1)
        assert len(cluster.prefill.submits) == len(cluster.decode.submits) == 1


CAUSES = {
    "peer_lost": END.CAUSE_PEER_LOST,
    "forward_failed": END.CAUSE_FORWARD_FAILED,
    "page_mismatch": END.CAUSE_PAGE_MISMATCH,
    "transfer_refused": END.CAUSE_TRANSFER_REFUSED,
    "failed": END.CAUSE_FAILED,
}


def broken(cause: Any) -> Any:
    return END(reason=END.REASON_FAILED, error="pull: broken", cause=cause)


@pytest.mark.parametrize("reason", CAUSES)
async def test_each_recomputation_is_counted_by_its_reason(cluster: Cluster, reason: str) -> None:
    cluster.prefill.on_submit = count_prefill
    call = cluster.generate()
    cluster.decode.say(await cluster.decode.submitted(), end=broken(CAUSES[reason]))
    cluster.decode.on_submit = count_decode
    assert (await collect(call)).token_ids == COUNTED
    assert await cluster.resubmitted(reason) == 1


async def test_a_cause_that_is_not_known_yet_is_a_failure(cluster: Cluster) -> None:
    cluster.prefill.on_submit = count_prefill
    call = cluster.generate()
    cluster.decode.say(await cluster.decode.submitted(), end=broken(99))
    cluster.decode.on_submit = count_decode
    assert (await collect(call)).token_ids == COUNTED
    assert await cluster.resubmitted("failed") == 1


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("peer_lost", grpc.StatusCode.UNAVAILABLE),
        ("page_mismatch", grpc.StatusCode.DATA_LOSS),
        ("transfer_refused", grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_strict_fails_what_would_be_computed_again(
    config: RouterConfig, reason: str, status: grpc.StatusCode
) -> None:
    async with running(replace(config, strict=True), "prefill-0", "decode-0") as cluster:
        call = cluster.generate()
        cluster.decode.say(await cluster.decode.submitted(), end=broken(CAUSES[reason]))
        error = await status_of(call)
        assert error.code() is status
        assert error.details() == (
            f"{reason}: decode-0: pull: broken (--strict: it is not computed again)"
        )
        failures = f'kvrelay_strict_failures_total{{model="counter",reason="{reason}"}}'
        assert await cluster.metric(failures) == 1
        assert await cluster.resubmitted(reason) == 0
        assert len(cluster.decode.submits) == 1


async def test_strict_names_a_lost_worker(config: RouterConfig) -> None:
    async with running(replace(config, strict=True), "prefill-0", "decode-0") as cluster:
        call = cluster.generate()
        await asyncio.gather(cluster.prefill.submitted(), cluster.decode.submitted())
        await cluster.decode.stop()
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details().startswith("worker_lost: worker decode-0 was lost: ")


async def test_strict_goes_on_after_a_retraction(config: RouterConfig) -> None:
    async with running(replace(config, strict=True), "prefill-0", "decode-0") as cluster:
        cluster.count()
        cluster.decode.on_submit = retract_after(3)
        assert (await collect(cluster.generate())).token_ids == COUNTED
        assert await cluster.resubmitted("retracted") == 1


async def test_attempts_are_bounded(cluster: Cluster, config: RouterConfig) -> None:
    call = cluster.generate()
    for number in range(1, config.max_attempts + 1):
        cluster.decode.say(await cluster.decode.submitted(number), end=BROKEN)
    error = await status_of(call)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert error.details() == "decode-0: pull: broken (attempt 3 of 3)"
    await until(lambda: len(cluster.prefill.cancels) == 3)
    await asyncio.sleep(0.2)
    assert len(cluster.decode.submits) == 3


# Forwards that fail.

FORWARD_FAILED = END(
    reason=END.REASON_FAILED, error="the forward failed", cause=END.CAUSE_FORWARD_FAILED
)
FAILED_ALONE = END(
    reason=END.REASON_FAILED, error="the forward failed", cause=END.CAUSE_FORWARD_FAILED_ALONE
)


async def test_a_failed_batch_is_computed_alone_elsewhere(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        cluster.prefill.on_submit = count_prefill
        call = cluster.generate()
        decodes = [worker for worker in cluster.workers if worker.role is WorkerRole.DECODE]
        await until(lambda: any(worker.submits for worker in decodes))
        decodes.sort(key=lambda worker: len(worker.submits))
        other, first = decodes
        other.on_submit = count_decode
        first.say(first.submits[0], end=FORWARD_FAILED)
        assert (await collect(call)).token_ids == COUNTED
        assert [submit.alone for submit in (*first.submits, *other.submits)] == [False, True]
        # The prefill worker's forwards have not failed.
        assert [submit.alone for submit in cluster.prefill.submits] == [False, False]


async def test_failed_batches_cost_no_attempt(cluster: Cluster, config: RouterConfig) -> None:
    """The neighbours may be to blame every time."""
    failures = 3 * config.max_attempts
    call = cluster.generate()
    for number in range(1, failures + 1):
        submit = await cluster.decode.submitted(number)
        if number == failures:
            cluster.count()
        cluster.decode.say(submit, end=FORWARD_FAILED)
    assert (await collect(call)).token_ids == COUNTED


async def test_a_request_that_fails_alone_on_two_workers_is_to_blame(config: RouterConfig) -> None:
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        call = cluster.generate()
        decodes = [worker for worker in cluster.workers if worker.role is WorkerRole.DECODE]
        for end in (FORWARD_FAILED, FAILED_ALONE):
            await until(lambda: any(worker.submits for worker in decodes))
            worker = next(worker for worker in decodes if worker.submits)
            decodes.remove(worker)
            worker.say(worker.submits[0], end=end)
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        blamed = "the forward failed (with this request alone, and before)"
        assert error.details() == f"{worker.name}: {blamed}"


async def test_a_single_worker_has_the_chance_to_be_replaced_first(cluster: Cluster) -> None:
    call = cluster.generate()
    for number in (1, 2):
        cluster.decode.say(await cluster.decode.submitted(number), end=FAILED_ALONE)
    cluster.decode.say(await cluster.decode.submitted(3), end=FAILED_ALONE)
    error = await status_of(call)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert await cluster.resubmitted("forward_failed_alone") == 2


async def die(cluster: Cluster, worker: ScriptedWorker, killed_by: Any = None) -> None:
    """End a worker, and let its successor say what its last forward computed."""
    last = worker.submits[-1]
    await worker.stop()
    await cluster.until_lost(worker.name)
    worker.incarnation += "-next"
    await worker.start()
    cluster.list_workers()
    await until(lambda: worker.hellos[-1].incarnation == worker.incarnation)
    if killed_by is not None:
        worker.say_late(last, 0, end=killed_by)


async def test_a_request_that_kills_two_processes_is_to_blame(patient: RouterConfig) -> None:
    """The second one alone: it was tried apart from others after the first."""
    async with running(patient, "prefill-0", "decode-0") as cluster:
        call = cluster.generate()
        assert not (await cluster.decode.submitted(1)).alone
        await die(cluster, cluster.decode, FORWARD_FAILED)
        assert (await cluster.decode.submitted(2)).alone
        await die(cluster, cluster.decode, FAILED_ALONE)
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details() == "the forward failed (with this request alone, and before)"


@pytest.mark.parametrize("killed_by", [None, FORWARD_FAILED])
async def test_a_neighbour_of_what_kills_processes_goes_on(
    patient: RouterConfig, killed_by: Any
) -> None:
    """Whether an operator kills them, or another request."""
    async with running(patient, "prefill-0", "decode-0") as cluster:
        cluster.prefill.on_submit = count_prefill
        call = cluster.generate()
        for number in (1, 2, 3):
            await cluster.decode.submitted(number)
            await die(cluster, cluster.decode, killed_by)
        await cluster.decode.submitted(4)
        cluster.decode.on_submit = count_decode
        cluster.decode.say(cluster.decode.submits[3], end=FORWARD_FAILED)
        assert (await collect(call)).token_ids == COUNTED


async def test_a_choice_that_has_gone_on_is_not_to_blame_for_an_earlier_failure(
    cluster: Cluster,
) -> None:
    cluster.prefill.on_submit = count_prefill
    call = cluster.generate(max_tokens=60)
    for number in range(1, 4):
        submit = await cluster.decode.submitted(number)
        first = check_emitted(cluster.decode, submit) + 1
        for position in range(first, first + 17):
            say_counted(cluster.decode, submit, position)
        cluster.decode.on_submit = count_decode if number == 3 else None
        cluster.decode.say(submit, first + 17, end=FAILED_ALONE)
    assert len((await collect(call)).token_ids) == 60


async def test_a_new_token_gives_all_attempts_back(cluster: Cluster, config: RouterConfig) -> None:
    """Every attempt breaks, but each has brought tokens; then they bring none any more."""
    cluster.prefill.on_submit = count_prefill
    call = cluster.generate(max_tokens=20)
    for number in range(1, 3 * config.max_attempts):
        submit = await cluster.decode.submitted(number)
        say_counted(cluster.decode, submit, check_emitted(cluster.decode, submit) + 1)
        await read(call, 2)  # one of each worker
        cluster.decode.say(submit, len(emitted_by(submit)) + 2, end=BROKEN)
    cluster.prefill.on_submit = None
    for number in range(3 * config.max_attempts, 4 * config.max_attempts - 1):
        cluster.decode.say(await cluster.decode.submitted(number), end=BROKEN)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert caught.value.details() == "decode-0: pull: broken (attempt 3 of 3)"


async def test_each_choice_has_attempts_of_its_own(cluster: Cluster) -> None:
    """One worker that dies with three choices is one failure of each, not three of one."""
    cluster.count()
    cluster.decode.on_submit = None
    call = cluster.generate(n=3)
    streamed = await read(call, 3)  # the prefill worker's: from here on the choices go apart
    for number in (1, 2):
        for submit in [await cluster.decode.submitted(k) for k in range(number, 3 * number - 1)]:
            first = len(emitted_by(submit)) + 1
            for choice in choices_of(submit):
                cluster.decode.say(submit, first, (), choice=choice, end=BROKEN)
    await cluster.decode.submitted(7)
    for submit in cluster.decode.submits[4:]:
        await count_decode(cluster.decode, submit)
    streamed += await read(call)
    for choice in range(3):
        first = 4 + 50 * choice
        assert [t for c, t in streamed if c == choice] == list(range(first, first + 8))


async def test_the_next_attempt_is_made_elsewhere_if_there_is_an_elsewhere(
    config: RouterConfig,
) -> None:
    async with running(config, "prefill-0", "decode-0", "decode-1") as cluster:
        cluster.count()
        broken, other = cluster.workers[1:]
        other.send(worker_pb2.AttachResponse(load=load(free=32)))
        broken.on_submit = None
        await asyncio.sleep(0.1)
        call = cluster.generate()
        broken.say(await broken.submitted(), end=BROKEN)
        assert (await collect(call)).token_ids == COUNTED
        assert (len(broken.submits), len(other.submits)) == (1, 1)
        await collect(cluster.generate(max_tokens=1))
        assert len(broken.submits) == 2, "for others it is as good as any"


def refuse(worker: ScriptedWorker, *prefills: ScriptedWorker) -> None:
    """A decode worker says that it does not read from these, and that it knows nobody else."""
    refused = [
        pb.PeerTransfer(incarnation=one.incarnation, refusal=f"{one.name} is slow")
        for one in prefills
    ]
    before = ["prefill-0-1", "prefill-1-1"]
    worker.send(worker_pb2.AttachResponse(load=load(), peers=refused, gone_peers=before))


async def test_no_request_goes_to_a_pair_that_is_refused(config: RouterConfig) -> None:
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    async with running(config, *names) as cluster:
        cluster.count()
        prefills, decodes = cluster.workers[:2], cluster.workers[2:]
        refuse(decodes[0], *prefills)
        refuse(decodes[1], prefills[0])
        await asyncio.sleep(0.1)
        for _ in range(3):
            assert (await collect(cluster.generate())).token_ids == COUNTED
        assert [len(one.submits) for one in cluster.workers] == [0, 3, 0, 3]
        refuse(decodes[1], *prefills)
        await asyncio.sleep(0.1)
        error = await status_of(cluster.generate())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "prefill-1 is slow" in (error.details() or "")
        assert await cluster.metric("kvrelay_worker_waits_total{") == 0, "nobody is on the way"
        refuse(decodes[0])
        await asyncio.sleep(0.1)
        assert (await collect(cluster.generate())).token_ids == COUNTED
        assert [len(one.submits) for one in decodes] == [1, 3]


async def test_a_request_that_waits_out_a_refusal_goes_on_when_it_ends(
    patient: RouterConfig,
) -> None:
    async with running(patient, "prefill-0", "decode-0") as cluster:
        cluster.prefill.on_submit = count_prefill
        call = cluster.generate()
        met = await cluster.decode.submitted()
        refuse(cluster.decode, cluster.prefill)
        why = END(reason=END.REASON_FAILED, cause=END.CAUSE_TRANSFER_REFUSED)
        cluster.decode.say(met, end=why)
        await asyncio.sleep(0.3)
        assert len(cluster.decode.submits) == 1
        cluster.decode.on_submit = count_decode
        refuse(cluster.decode)
        assert (await collect(call)).token_ids == COUNTED


async def test_output_that_was_complete_is_not_submitted_again(cluster: Cluster) -> None:
    call = cluster.generate(max_tokens=3)
    cluster.prefill.say(await cluster.prefill.submitted(), 0, (4,), end=HANDED_OVER)
    cluster.decode.say(await cluster.decode.submitted(), 1, (5, 6))
    await read(call, 3)
    await cluster.decode.stop()
    assert (await call.read()).complete.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(cluster.prefill.submits) == 1


async def test_text_goes_on_across_attempts(cluster: Cluster) -> None:
    """A stop string and a character whose parts come from two attempts."""
    call = cluster.generate(stop=["ab"], max_tokens=50)
    tokenize = cluster.stub.Tokenize
    ids = [(await tokenize(pb.TokenizeRequest(text=x))).input_ids[0] for x in ("x", "a", "b")]
    face = list((await tokenize(pb.TokenizeRequest(text="🦄"))).input_ids)
    cluster.prefill.say(await cluster.prefill.submitted(), 0, tuple(face[:-1]), end=HANDED_OVER)
    cluster.decode.say(await cluster.decode.submitted(), len(face) - 1, end=RETRACTED)
    again = await cluster.prefill.submitted(2)
    cluster.prefill.say(again, len(face) - 1, (face[-1], ids[0], ids[1]), end=HANDED_OVER)
    cluster.decode.say(await cluster.decode.submitted(2), len(face) + 2, end=RETRACTED)
    again = await cluster.prefill.submitted(3)
    end = END(reason=END.REASON_STOP, matched_stop_string="ab")
    cluster.prefill.say(again, len(face) + 2, (ids[2],), end=end)
    streamed = await collect(call)
    assert streamed.text == "🦄x"
    assert streamed.token_ids == [*face, *ids]


async def test_many_requests_survive_a_worker_that_retracts_again_and_again(
    cluster: Cluster,
) -> None:
    cluster.count()
    cluster.decode.on_submit = retract_after(*[3, 0, 1] * 7)
    streams = await asyncio.gather(*(collect(cluster.generate(max_tokens=20)) for _ in range(8)))
    assert all(streamed.token_ids == list(range(4, 24)) for streamed in streams)
    assert await cluster.resubmitted("retracted") == 21
