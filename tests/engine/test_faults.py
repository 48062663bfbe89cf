"""Faults on demand: what can be asked for, and when it happens."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from kvrelay.engine.faults import Fault, FaultAction, FaultEvent, FaultPlan, parse_faults
from kvrelay.engine.phases import Phase
from kvrelay.engine.scheduler.outbox import MessageStream
from kvrelay.engine.worker.faulty import FaultyOutbox
from kvrelay.wire.hand_over import Done, Sequenced

DONE = Sequenced(1, Done())
LATER = Sequenced(1, "later")


def test_faults_are_what_their_specs_say():
    assert parse_faults("delay:pull:3:0.5s, decode-1/stop:pulling:5s,kill:queued") == (
        Fault(FaultAction.DELAY, FaultEvent.PULL, nth=3, seconds=0.5),
        Fault(FaultAction.STOP, Phase.PULLING, seconds=5.0, worker="decode-1"),
        Fault(FaultAction.KILL, Phase.QUEUED),
    )
    assert parse_faults("kill:saving:3, stop:writing_back:1s, d0/kill:prefetching") == (
        Fault(FaultAction.KILL, Phase.SAVING, nth=3),
        Fault(FaultAction.STOP, Phase.WRITING_BACK, seconds=1.0),
        Fault(FaultAction.KILL, Phase.PREFETCHING, worker="d0"),
    )
    assert parse_faults("lose:decoding:2") == (Fault(FaultAction.LOSE, Phase.DECODING, nth=2),)
    assert parse_faults("hang:forward:2, poison:forward, p0/fail:forward@chat-1.a:always") == (
        Fault(FaultAction.HANG, FaultEvent.FORWARD, nth=2),
        Fault(FaultAction.POISON, FaultEvent.FORWARD),
        Fault(FaultAction.FAIL, FaultEvent.FORWARD, worker="p0", request="chat-1.a", always=True),
    )
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("explode:pull", "'explode:pull': explode is none of delay, drop, duplicate, fail, "),
        ("drop:everything", "'drop:everything': everything is none of ask, grant, announce, "),
        ("kill:pull", "'kill:pull': pull is none of queued, asked, granted, prefilling, "),
        ("corrupt:done", "'corrupt:done': only a pull can be corrupted"),
        ("drop:done:0", "'drop:done:0': they are counted from 1"),
        ("drop:done:1:2s", "'drop:done:1:2s': drop takes no time"),
        ("delay:pull", "'delay:pull': by how much"),
        ("delay:pull:2:0.5", "'delay:pull:2:0.5' is not "),
        ("drop:done,drop", "'drop' is not "),
        ("drop:forward", "'drop:forward': a forward can crash, delay, fail, hang, poison"),
        ("hang:pull", "'hang:pull': only a forward can hang"),
        ("drop:done:always", "'drop:done:always': only a forward "),
        ("fail:pull@mine", "'fail:pull@mine': only a forward "),
    ],
)
def test_a_spec_that_says_nothing_is_refused_in_one_line(spec: str, why: str):
    with pytest.raises(ValueError, match=f"^{why}"):
        parse_faults(spec)


def test_the_nth_is_counted_and_happens_once():
    plan = FaultPlan(parse_faults("drop:done:2"))
    fates = [plan.take(FaultEvent.DONE), plan.take(FaultEvent.ASK), plan.take(FaultEvent.DONE)]
    assert [fate is not None for fate in fates] == [False, False, True]
    assert plan.take(FaultEvent.DONE) is None
    assert plan.fired == 1


def test_a_fault_of_forwards_can_be_of_one_request_and_happen_always():
    plan = FaultPlan(parse_faults("fail:forward@mine:2:always"))
    batches = [{"other"}, {"mine"}, {"other"}, {"mine", "other"}, {"mine"}, {"other"}]
    fates = [plan.take(FaultEvent.FORWARD, requests=batch) for batch in batches]
    assert [fate is not None for fate in fates] == [False, False, False, True, True, False]
    assert plan.fired == 2


def test_only_requests_shared_with_the_peer_count(monkeypatch: pytest.MonkeyPatch):
    struck: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: struck.append((pid, number)))
    plan = FaultPlan([Fault(FaultAction.KILL, Phase.PULLING, peer="prefill-0-abc", pid=7)])
    plan.reach(Phase.PULLING, "prefill-1-abc")
    plan.reach(Phase.PULLED, "prefill-0-abc")
    assert not struck
    plan.reach(Phase.PULLING, "prefill-0-abc")
    plan.reach(Phase.PULLING, "prefill-0-abc")
    assert struck == [(7, signal.SIGKILL)]


class Stream(MessageStream[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def deliver(self, message: Any) -> None:
        self.heard.append(message)

    def close(self) -> None:
        self.heard.append("closed")


@pytest.mark.parametrize(
    ("spec", "heard"),
    [
        ("drop:done", [LATER]),
        ("duplicate:done", [DONE, DONE, LATER]),
        ("fail:done", ["closed", LATER]),
        ("drop:done:2", [DONE, LATER]),
    ],
)
def test_an_outbox_does_to_a_message_what_was_asked(spec: str, heard: list[Any]):
    outbox = FaultyOutbox(lambda function, *args: function(*args), FaultPlan(parse_faults(spec)))
    stream = Stream()
    outbox.put(stream, DONE)
    outbox.put(stream, LATER)
    outbox.flush()
    assert stream.heard == heard


def test_what_is_behind_a_late_message_is_late_too():
    plan = FaultPlan(parse_faults("delay:done:0.05s"))
    outbox = FaultyOutbox(lambda function, *args: function(*args), plan)
    late, other = Stream(), Stream()
    for stream in (late, other):
        outbox.put(stream, DONE)
        outbox.put(stream, LATER)
    outbox.flush()
    assert (late.heard, other.heard) == ([], [DONE, LATER])
    while not late.heard:
        pass
    while len(late.heard) < 2:
        pass
    assert late.heard == [DONE, LATER]
