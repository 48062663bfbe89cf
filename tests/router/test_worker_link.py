"""A link to one scripted worker, without a router."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.net.channels import worker_credentials
from kvrelay.net.tls import TlsFiles
from kvrelay.router.admission.seeds import Seeds
from kvrelay.router.admission.validation import Validator
from kvrelay.router.generation import Submission
from kvrelay.router.placement.known_prefixes import KnownPrefixes
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.router.placement.worker_link import WorkerLink
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import worker_pb2
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.output import RequestOutput, SampledToken
from kvrelay.wire.page_hash import PageHashes
from kvrelay.wire.submit import RequestKey
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.certificates import Authority
from tests.idle import least_cpu_seconds
from tests.worker_infos import worker_info

from .scripted_worker import END, ScriptedWorker, load, until

LINKS = 300
SECONDS = 60.0


class Heard:
    """Remembers what a link tells it."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.lost: list[str] = []

    def on_output(self, role: WorkerRole, output: Any) -> None:
        self.outputs.append(output)

    def on_token(
        self, role: WorkerRole, attempt: int, choice: int, index: int, token_id: int
    ) -> None:
        key = RequestKey("", "", attempt, choice)
        self.outputs.append(RequestOutput(key, index, (SampledToken(token_id),)))

    def on_lost(self, attempt: int, endpoint: Any, detail: str) -> None:
        self.lost.append(detail)


def submission(
    request_id: str, prompt_tokens: int, attempt: int = 1, **sampling: Any
) -> Submission:
    message = pb.GenerateRequest(
        request_id=request_id, sampling_params=pb.SamplingParams(**sampling)
    )
    message.input_ids.ids.extend([1] * prompt_tokens)
    request = Validator("m", lambda text, most_tokens: [], 16, Seeds(b"key")).validate(
        message, RequestLimits(402, 512, 512, 512)
    )
    return Submission.of(request, attempt, range(1), 0.0)


def link_to(
    endpoint: WorkerInfo, shown: TlsFiles | None = None, prefixes: KnownPrefixes | None = None
) -> WorkerLink:
    """One that nobody listens to."""
    return WorkerLink(
        endpoint,
        router_id="router",
        credentials=worker_credentials(shown),
        max_message_bytes=1 << 20,
        on_change=lambda link: None,
        on_stale=lambda: None,
        on_killed=lambda output: None,
        prefixes=prefixes or KnownPrefixes(0),
    )


@asynccontextmanager
async def running(
    worker: ScriptedWorker,
    shown: TlsFiles | None = None,
    prefixes: KnownPrefixes | None = None,
) -> AsyncIterator[WorkerLink]:
    await worker.start()
    link = link_to(worker.endpoint, shown, prefixes)
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await worker.stop()


async def test_the_backlog_counts_what_the_load_does_not_know_yet() -> None:
    worker, heard = ScriptedWorker("prefill-0", WorkerRole.PREFILL), Heard()

    async def report(waiting_tokens: int) -> int:
        worker.send(worker_pb2.AttachResponse(load=load(waiting_tokens=waiting_tokens)))
        await until(lambda: link.load.waiting_tokens == waiting_tokens)
        return link.candidate.backlog_tokens

    async with running(worker) as link:
        await until(lambda: link.ready)
        assert await report(50) == 50  # another router's
        link.submit(submission("a", 30), heard)
        assert link.candidate.backlog_tokens == 80
        assert await report(81) == 81  # knows of "a" now
        assert await report(1) == 30  # was on its way before "a" arrived
        worker.say(await worker.submitted(), 0, (5,))
        await until(lambda: len(heard.outputs) == 1)
        assert link.candidate.backlog_tokens == 0  # perhaps what was reported was of "a"
        assert await report(2) == 2
    assert heard.lost == ["was detached"]


async def test_what_has_begun_leaves_the_backlog_before_the_next_load_says_so() -> None:
    worker, heard = ScriptedWorker("prefill-0", WorkerRole.PREFILL), Heard()
    async with running(worker) as link:
        await until(lambda: link.ready)
        for attempt, request_id in ((1, "a"), (2, "b")):
            link.submit(submission(request_id, 30, attempt), heard)
        worker.say(await worker.submitted(), 0, (5,))
        await until(lambda: len(heard.outputs) == 1)
        assert link.candidate.backlog_tokens == 30
        # Its pages are held now, and the load does not say so yet.
        assert link.candidate.pending_tokens == 60
        worker.say(worker.submits[0], 1, (6,))
        await until(lambda: len(heard.outputs) == 2)
        assert link.candidate.backlog_tokens == 30
        link.cancel("b", 2)
        assert link.candidate.backlog_tokens == 0
        assert link.candidate.pending_tokens == 30
        worker.send(worker_pb2.AttachResponse(load=load()))
        await until(lambda: link.candidate.pending_tokens == 0)


@pytest.mark.parametrize("ends", ["unbegun", "with a token", "cancelled", "cancelled, begun"])
async def test_what_comes_and_goes_without_a_load_leaves_nothing(ends: str) -> None:
    worker, heard = ScriptedWorker("aggregated-0", WorkerRole.AGGREGATED), Heard()
    async with running(worker) as link:
        await until(lambda: link.ready)
        before = link.candidate, link.prompt_queue
        link.submit(submission("a", 30), heard)
        assert link.candidate.backlog_tokens == sum(link.prompt_queue.by_size) == 30
        submit, end = await worker.submitted(), END(reason=END.REASON_STOP)
        match ends:
            case "unbegun":
                worker.say(submit, end=end)
            case "with a token":
                worker.say(submit, 0, (5,), end=end)
            case "cancelled, begun":
                worker.say(submit, 0, (5,))
        if ends != "cancelled":
            await until(lambda: len(heard.outputs) == 1)
        link.cancel("a", 1)
        assert (link.candidate, link.prompt_queue) == before


async def test_what_ends_after_a_load_counts_for_nothing_either() -> None:
    worker, heard = ScriptedWorker("aggregated-0", WorkerRole.AGGREGATED), Heard()
    async with running(worker) as link:
        await until(lambda: link.ready)
        link.submit(submission("a", 30), heard)
        worker.send(worker_pb2.AttachResponse(load=load(waiting_tokens=50)))
        await until(lambda: link.load.waiting_tokens == 50)
        link.submit(submission("b", 7, 2), heard)
        link.cancel("a", 1)  # of the 50, or not
        assert link.candidate.backlog_tokens == 57
        link.cancel("b", 2)
        assert link.candidate.backlog_tokens == 50


async def test_tokens_in_lists_come_before_the_end_that_comes_with_them() -> None:
    worker, heard = ScriptedWorker("aggregated-0", WorkerRole.AGGREGATED), Heard()
    async with running(worker) as link:
        await until(lambda: link.ready)
        for attempt, request_id in ((7, "a"), (8, "b")):
            link.submit(submission(request_id, 30, attempt), heard)
        await worker.submitted(2)
        message = worker_pb2.AttachResponse()
        message.outputs.add(request_id="a", attempt=7, index=1, end=END(reason=END.REASON_STOP))
        message.next_tokens.attempts.extend([7, 8, 9])
        message.next_tokens.choices.extend([0, 0, 0])
        message.next_tokens.indexes.extend([0, 3, 0])
        message.next_tokens.token_ids.extend([40, 50, 60])
        worker.send(message)
        await until(lambda: len(heard.outputs) == 3)
    said = [
        (one.key.attempt, one.index, [token.token_id for token in one.tokens])
        for one in heard.outputs
    ]
    assert said == [(7, 0, [40]), (8, 3, [50]), (7, 1, [])]
    assert heard.lost == ["was detached"], "of the one that has not ended"


def told(number: int, *prompt_tokens: int, begins: bool = False) -> worker_pb2.AttachResponse:
    """An update with the marks of such prompts as `submission` has."""
    hashes = PageHashes(NO_MODEL, 16)
    marks = {mark for tokens in prompt_tokens for mark in hashes.marks_of([1] * tokens, "/")}
    update = worker_pb2.PrefixUpdate(
        number=number, page_size=16, begins=begins, stored=sorted(marks)
    )
    return worker_pb2.AttachResponse(prefixes=update)


async def test_a_worker_is_asked_for_its_prefixes_after_a_gap() -> None:
    worker, prefixes = ScriptedWorker("prefill-0", WorkerRole.PREFILL), KnownPrefixes(100)

    def hit() -> int:
        return prefixes.hit_tokens("prefill-0-1", prefixes.marks_of([1] * 300, "/"))

    async with running(worker, prefixes=prefixes) as link:
        await until(lambda: link.ready)
        worker.send(told(0, 64, begins=True))
        await until(lambda: hit() == 64)
        worker.send(told(1, 128))
        await until(lambda: hit() == 128)
        worker.send(told(3, 192))
        await until(lambda: worker.told_anew == 1)
        worker.send(told(4, 256))
        worker.send(told(0, 256, begins=True))
        await until(lambda: hit() == 256)
        assert worker.told_anew == 1
        worker.break_stream()
        await until(lambda: not link.ready)
        assert hit() == 0
        await until(lambda: link.ready)
        worker.send(told(0, 64, begins=True))
        await until(lambda: hit() == 64)
    assert prefixes.num_entries == 0


@pytest.mark.parametrize("ends", ["told", "in vain", "cancelled"])
async def test_a_prompt_is_expected_where_it_was_sent(ends: str) -> None:
    worker, prefixes = ScriptedWorker("prefill-0", WorkerRole.PREFILL), KnownPrefixes(100)

    async with running(worker, prefixes=prefixes) as link:
        await until(lambda: link.ready)
        worker.send(told(0, begins=True))
        await until(lambda: bool(prefixes.marks_of([], "/")))
        one, heard = submission("a", 130), Heard()
        marks = prefixes.marks_of([1] * 130, "/")
        one = replace(one, request=replace(one.request, marks=marks))
        link.submit(one, heard)
        assert prefixes.hit_tokens("prefill-0-1", marks) == 128
        if ends == "cancelled":
            link.cancel("a", 1)
        else:
            message = told(1, 64) if ends == "told" else worker_pb2.AttachResponse()
            end = END(reason=END.REASON_ABORTED)
            message.outputs.add(request_id="a", attempt=1, end=end)
            await worker.submitted()
            worker.send(message)
            await until(lambda: len(heard.outputs) == 1)
        assert prefixes.hit_tokens("prefill-0-1", marks) == (64 if ends == "told" else 0)


async def test_a_worker_that_is_away_costs_next_to_nothing() -> None:
    worker = ScriptedWorker("prefill-0", WorkerRole.PREFILL)
    async with running(worker) as link:
        await until(lambda: link.ready)
        await worker.stop()
        await until(lambda: not link.ready)
        assert await least_cpu_seconds(1.0, 0.1) < 0.1
        await worker.start()
        await until(lambda: link.ready)


async def test_a_link_ends_when_it_is_cancelled_whatever_it_does() -> None:
    """gRPC takes a cancellation for itself that comes while a connection is being refused."""
    rng, tasks = random.Random(0), set()
    away = replace(worker_info(), address="127.0.0.1:1")
    for _ in range(LINKS):
        task = asyncio.create_task(link_to(away).run())
        tasks.add(task)
        await asyncio.sleep(rng.uniform(0, 0.01))
        task.cancel()
    _, left = await asyncio.wait(tasks, timeout=SECONDS)
    for task in left:
        task.cancel()
    assert not left


@pytest.mark.parametrize("shown", ["nothing", "another authority's", "the authority's"])
async def test_a_worker_takes_routers_of_its_authority_alone(
    shown: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvrelay.router.placement.worker_link")
    authority, stranger = Authority(tmp_path / "tls"), Authority(tmp_path / "other", "other")
    # It trusts the worker, so that it is the worker who refuses.
    stranger_files = replace(stranger.issue(), ca=authority.ca)
    files = {
        "nothing": None,
        "another authority's": stranger_files,
        "the authority's": authority.issue("router"),
    }
    worker = ScriptedWorker("prefill-0", WorkerRole.PREFILL, authority.issue())
    async with running(worker, files[shown]) as link:
        if shown == "the authority's":
            await until(lambda: link.ready)
        else:
            await until(lambda: caplog.text.count("UNAVAILABLE") >= 2)  # it comes again
            assert not link.ready
            assert worker.hellos == []
