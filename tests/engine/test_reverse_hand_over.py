"""A long turn of a conversation: a prefill worker reads what the decode worker has of it first.

The decode worker has a session's pages, or those of the last answer in its prefix index.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvrelay.engine.scheduler.commands import PeerDied
from kvrelay.kv_transfer.hand_over.states import PrefillState
from kvrelay.kv_transfer.pull import Pull
from kvrelay.kv_transfer.verify_pages import VerifyPages
from kvrelay.prefill_worker.request import HistoryRead, StreamMessage
from kvrelay.wire.hand_over import Grant, PageRun, Released
from kvrelay.wire.output import EndReason
from kvrelay.wire.speeds import StepSpeeds
from tests.engine.conversations import Conversation, computed_tokens, talk
from tests.engine.session_cluster import FIRST, ends, finish, pools, read_from, sample, turns
from tests.engine.simulation import SimRequest, Simulation, SimWorker, count, reference
from tests.engine.test_scenarios import one_pair, step_until

DELTA = random.Random(3).choices(range(97), k=40)
OUTPUT = 17
PAGES_KEPT = (len(FIRST) + OUTPUT - 1) // 4


def begun(
    *, is_session: bool = True, **options: Any
) -> tuple[Simulation, Conversation, SimWorker, SimWorker]:
    """A pair, and a conversation whose first turn has ended."""
    simulation = one_pair(5, **{"pages": 100, **options})
    pair = prefill, decode = simulation.prefills[0], simulation.decodes[0]
    if not is_session:  # the first turn that finds something makes the decode worker readable
        earlier = Conversation(simulation, "earlier", is_session=False)
        for _ in range(2):
            talk(earlier, [7] * 9, 6, place=pair)
    conversation = Conversation(simulation, "s", is_session=is_session)
    talk(conversation, FIRST, OUTPUT, place=pair)
    return simulation, conversation, prefill, decode


def say(session: Conversation) -> SimRequest:
    simulation = session.simulation
    return session.say(DELTA, 6, place=(simulation.prefills[0], simulation.decodes[0]))


def state(turn: SimRequest) -> PrefillState | None:
    request = turn.prefill.context.requests.get(turn.key)
    return None if request is None else request.hand_over.state


def reads(worker: SimWorker, outcome: str) -> int:
    return sample(worker, "history_reads", outcome=outcome)


def withhold(simulation: Simulation, kind: type) -> Callable[[], None]:
    """Carry no message of this kind to prefill workers before the returned function is called."""
    held: list[tuple[SimWorker, StreamMessage]] = []
    carry = simulation.carry_messages

    def carried(pair: Any) -> None:
        carry(pair)
        inbox = pair[2].inbox
        messages = inbox.take_all() if inbox else ()
        for message in messages:
            is_meant = isinstance(message, StreamMessage) and isinstance(
                message.sequenced.message, kind
            )
            if is_meant:
                held.append((pair[2], message))
            else:
                inbox.post(message)

    def go_on() -> None:
        simulation.carry_messages = carry  # type: ignore[method-assign]
        for worker, message in held:
            worker.inbox.post(message)

    simulation.carry_messages = carried  # type: ignore[method-assign]
    return go_on


@pytest.mark.parametrize("is_session", [True, False], ids=["session", "ordinary"])
def test_only_the_delta_is_computed(*, is_session: bool) -> None:
    simulation, session, prefill, decode = begun(is_session=is_session)
    computed, history = computed_tokens(prefill), len(session.tokens)
    talk(session, DELTA, 6, place=(prefill, decode))
    own = len(FIRST) // 4
    assert read_from(simulation, decode) == PAGES_KEPT - own
    assert computed_tokens(prefill) - computed == history + len(DELTA) - 4 * PAGES_KEPT
    assert reads(prefill, "valid") == 1
    finish(simulation, session)


def test_nothing_is_computed_announced_or_published_before_the_verdict() -> None:
    simulation, session, prefill, decode = begun()
    go_on = withhold(simulation, Released)
    turn = say(session)
    computed, published = computed_tokens(prefill), pools(prefill).cached_evictable
    while simulation.step():
        pass
    request = prefill.context.requests[turn.key]
    assert state(turn) is PrefillState.LOADED
    assert (request.announced, turn.output) == (False, [])
    assert computed_tokens(prefill) == computed
    assert pools(prefill).cached_evictable + pools(prefill).cached_protected <= published
    assert decode.agent.serving == 0, "the answer is sent: nobody reads any more"
    go_on()
    simulation.run()
    assert turn.output == reference(turn.prompt, 6)
    finish(simulation, session)


def test_while_it_is_read_the_decode_worker_serves_and_the_prefill_worker_holds_all() -> None:
    simulation, session, prefill, decode = begun()
    turn = say(session)
    step_until(simulation, lambda: state(turn) is PrefillState.LOADING)
    assert decode.agent.serving == 1
    held = pools(prefill)
    own = (len(turn.prompt) + 3) // 4 - len(FIRST) // 4
    assert held.held + held.promised == own
    simulation.run()
    finish(simulation, session)


@pytest.mark.parametrize("phase", [PrefillState.ASKED, PrefillState.LOADING, PrefillState.LOADED])
@pytest.mark.parametrize("how", ["stream", "prefill", "decode", "read"])
@pytest.mark.parametrize("lender", ["session", "ended session", "ordinary"])
def test_a_hand_over_that_breaks_while_it_is_reversed(
    phase: PrefillState, how: str, lender: str
) -> None:
    """The client has the same tokens, the session stays, and every page comes back.

    So it is where the session has ended, or there was none: the prefix index has what is lent.
    """
    simulation, session, prefill, decode = begun(is_session=lender != "ordinary")
    turn = say(session)
    decode.turn()
    assert lender != "ended session" or decode.context.session_turns.evict_oldest()
    step_until(simulation, lambda: state(turn) is phase)
    if how == "stream":
        simulation.break_stream()
    elif how == "read":
        if phase is not PrefillState.LOADING:
            pytest.skip("nothing is read")
        pull, _ = prefill.agent.ordered[0]
        simulation.fail_read()
        assert pull is prefill.agent.ordered[0][0], "its bytes may still come"
        step_until(simulation, lambda: prefill.name in turn.ends)
        assert pools(prefill).quarantined == PAGES_KEPT - len(FIRST) // 4
        prefill.inbox.post(PeerDied(decode.name))
    else:
        simulation.cancel(turn, prefill if how == "prefill" else decode)
    simulation._place = lambda *_: (prefill, decode)  # type: ignore[method-assign]
    simulation.run()
    if how == "read":
        assert reads(prefill, "failed") == 1
    session.take()
    if turn.output:
        assert turn.output == reference(turn.prompt, 6)[: len(turn.output)]
    assert ends(decode, "roll_back") == 0
    talk(session, DELTA, 6, place=(prefill, decode))
    finish(simulation, session)


def test_an_attempt_after_a_failed_read_is_lent_nothing() -> None:
    simulation, session, prefill, decode = begun()
    turn = say(session)
    step_until(simulation, lambda: state(turn) is PrefillState.LOADING)
    simulation.fail_read()
    step_until(simulation, lambda: len(turn.ends) == 2)
    prefill.inbox.post(PeerDied(decode.name))
    simulation.run()
    assert not turn.output
    lent = read_from(simulation, decode)
    simulation._attempt([turn])
    simulation.run()
    assert turn.output == reference(turn.prompt, 6)
    assert (read_from(simulation, decode), reads(prefill, "valid")) == (lent, 0)
    finish(simulation, session)


def test_after_a_failed_read_others_compute_what_they_are_lent_for_a_while() -> None:
    """One request pays for a peer that cannot be read, not every one."""
    simulation, conversation, prefill, decode = begun(is_session=False)
    other = Conversation(simulation, "other", is_session=False)
    talk(other, [5, *FIRST], OUTPUT, place=(prefill, decode))
    turn = say(conversation)
    step_until(simulation, lambda: state(turn) is PrefillState.LOADING)
    simulation.fail_read()
    step_until(simulation, lambda: reads(prefill, "failed") == 1)
    avoided = prefill.scheduler._histories._avoided_until
    until = avoided[decode.name]
    assert until > time.monotonic()
    prefill.inbox.post(PeerDied(decode.name))  # so that the fences pass
    simulation.run()
    assert not avoided
    for end, valid in ((until, 0), (0.0, 1)):
        avoided[decode.name] = end
        talk(other, DELTA, OUTPUT, place=(prefill, decode))
        assert (reads(prefill, "failed"), reads(prefill, "valid")) == (1, valid)
    finish(simulation)


def test_pages_that_differ_fail_the_attempt() -> None:
    simulation, session, prefill, decode = begun(verify_pages=VerifyPages.ALL)
    turn = say(session)
    tampered: list[Pull] = []

    def tamper(worker: SimWorker, pull: Pull) -> None:
        if worker is prefill and not tampered:
            tampered.append(pull)
            worker.counting.kv[0][pull.local_pages[0][0]] += 1

    simulation.on_read = tamper  # type: ignore[method-assign]
    simulation.run()
    assert tampered
    assert count(prefill, "page_mismatches") == 1
    assert reads(prefill, "failed") == 1
    assert ends(decode, "failed") == 1, "what was lent may be wrong: nobody goes on with it"
    session.take()
    if turn.output:
        assert turn.output == reference(turn.prompt, 6)[: len(turn.output)]
    finish(simulation, session)


def test_the_end_of_a_read_whose_request_has_ended_is_no_duplicate() -> None:
    simulation, session, prefill, _ = begun()
    turn = say(session)
    step_until(simulation, lambda: state(turn) is PrefillState.LOADING)
    simulation.cancel(turn, prefill)
    simulation.run()
    assert reads(prefill, "valid") == 0
    assert sample(prefill, "dropped_messages", kind="duplicate") == 0
    session.take()
    finish(simulation, session)


@pytest.mark.parametrize("verify", VerifyPages)
def test_the_end_of_a_read_that_is_told_twice_is_taken_once(verify: VerifyPages) -> None:
    simulation, session, prefill, decode = begun(verify_pages=verify)
    handle = prefill.scheduler.handle

    def twice(message: Any) -> None:
        handle(message)
        if isinstance(message, HistoryRead):
            handle(message)

    prefill.scheduler.handle = twice
    talk(session, DELTA, 6, place=(prefill, decode))
    assert reads(prefill, "valid") == 1
    assert sample(prefill, "dropped_messages", kind="duplicate") == 1
    finish(simulation, session)


@pytest.mark.parametrize("verify", [VerifyPages.SAMPLE, VerifyPages.ALL])
def test_pages_that_are_compared_and_equal_are_used(verify: VerifyPages) -> None:
    simulation, session, prefill, decode = begun(verify_pages=verify)
    talk(session, DELTA, 6, place=(prefill, decode))
    assert reads(prefill, "valid") == 1
    finish(simulation, session)


def test_a_history_that_is_computed_sooner_is_not_read() -> None:
    simulation, session, prefill, decode = begun()
    simulation.write_bytes_per_second = 1.0
    del prefill.scheduler._histories._seconds_to_compute
    prefill.context.speed_learner.speeds = StepSpeeds(0.001, 0.001, prompts_known=True)
    talk(session, DELTA, 6, place=(prefill, decode))
    assert (reads(prefill, "not_needed"), read_from(simulation, decode)) == (1, 0)
    finish(simulation, session)


def test_a_read_corrects_an_expectation_that_has_faded() -> None:
    """Else ever shorter answers are read, each later than it would be computed."""
    simulation, session, prefill, decode = begun()
    histories = prefill.scheduler._histories
    histories._met.add(decode.name)
    histories._overhead_seconds = 1e-6
    go_on = withhold(simulation, Released)
    turn = say(session)
    step_until(simulation, lambda: state(turn) is PrefillState.LOADED)
    time.sleep(0.02)
    go_on()
    simulation.run()
    assert histories._overhead_seconds >= 0.02
    finish(simulation, session)


def test_a_session_that_was_given_up_before_the_grant_is_lent_from_the_prefix_index() -> None:
    simulation, session, prefill, decode = begun()
    computed, history = computed_tokens(prefill), len(session.tokens)
    turn = say(session)
    decode.turn()
    assert decode.context.session_turns.evict_oldest()
    simulation.run()
    assert turn.output == reference(turn.prompt, 6)
    assert reads(prefill, "valid") == 1
    assert computed_tokens(prefill) - computed == history + len(DELTA) - 4 * PAGES_KEPT
    finish(simulation, session)


def test_a_session_that_was_given_up_is_not_lent_if_nothing_is_left_of_it() -> None:
    simulation, session, prefill, decode = begun(cached=False)
    turn = say(session)
    decode.turn()
    assert decode.context.session_turns.evict_oldest()
    simulation.run()
    assert turn.output == reference(turn.prompt, 6)
    assert (reads(prefill, "valid"), read_from(simulation, decode)) == (0, 0)
    finish(simulation, session)


def test_turns_of_more_sessions_than_a_worker_has_rows_compute_what_is_new() -> None:
    """The oldest sessions end for want of a row, though there are pages for all of them."""
    simulation = one_pair(5, pages=400, rows=3)
    pair = prefill, decode = simulation.prefills[0], simulation.decodes[0]
    sessions = [Conversation(simulation, str(number)) for number in range(5)]
    for number, session in enumerate(sessions):
        talk(session, [number, *FIRST], OUTPUT, place=pair)
    talk(sessions.pop(0), DELTA, 6, place=pair)  # the first that finds something makes it readable
    for session in sessions:
        computed, kept = computed_tokens(prefill), (len(session.tokens) - 1) // 4 * 4
        talk(session, DELTA, 6, place=pair)
        assert computed_tokens(prefill) - computed == len(session.tokens) - 6 - kept
    assert turns(decode, "resumed") == 0, "each session has ended before its next turn"
    assert reads(prefill, "valid") == 4
    finish(simulation, *sessions)


def test_what_differs_of_the_prefix_index_is_lent_once() -> None:
    """It may be the decode worker's that is wrong: nobody finds it any more."""
    simulation, session, prefill, decode = begun(verify_pages=VerifyPages.ALL)
    turn = say(session)
    decode.turn()
    assert decode.context.session_turns.evict_oldest()
    lent: list[Pull] = []

    def tamper(worker: SimWorker, pull: Pull) -> None:
        if pull.peer == decode.name:
            lent.append(pull)
            worker.counting.kv[0][pull.local_pages[0][0]] += 1

    simulation.on_read = tamper  # type: ignore[method-assign]
    prompt = np.array(turn.prompt, np.int32)
    found = decode.kv_cache.count_cached(prompt)
    step_until(simulation, lambda: decode.context.requests[turn.key].hand_over.lent_differs)
    right = decode.kv_cache.count_cached(prompt)
    assert 0 < right < found, "at once; what came before was not read"
    assert right == found - 4 * lent[0].num_pages
    simulation.run()
    assert count(prefill, "page_mismatches") == 1
    assert (len(lent), reads(prefill, "valid")) == (1, 0)
    simulation._attempt([turn])
    simulation.run()
    assert turn.output == reference(turn.prompt, 6)
    assert len(lent) == 1
    finish(simulation, session)


@pytest.mark.parametrize(
    "runs",
    [(), (PageRun(1, (1,)),), (PageRun(0, ()),), (PageRun(0, tuple(range(90))),)],
    ids=["no pool", "not from the first page", "no page", "more than the prompt"],
)
def test_a_grant_that_lends_what_is_no_part_of_the_prompt_is_an_error(
    runs: tuple[PageRun, ...],
) -> None:
    simulation, session, prefill, _ = begun()
    carry = simulation.carry_messages

    def planted(pair: Any) -> None:
        carry(pair)
        messages = prefill.inbox.take_all() if prefill.inbox else ()
        for message in messages:
            if isinstance(message, StreamMessage):
                grant = message.sequenced.message
                if isinstance(grant, Grant) and grant.history is not None:
                    object.__setattr__(grant.history, "runs", runs)
            prefill.inbox.post(message)

    simulation.carry_messages = planted  # type: ignore[method-assign]
    turn = say(session)
    step_until(simulation, lambda: prefill.name in turn.ends)
    assert turn.ends[prefill.name].reason is EndReason.FAILED
    simulation.carry_messages = carry  # type: ignore[method-assign]
    simulation.run()
    session.take()
    finish(simulation, session)


@pytest.mark.parametrize("seed", range(6))
def test_long_turns_of_many_sessions_in_too_little_memory(seed: int) -> None:
    """Neither side waits for the other while it holds: all turns end, with the right tokens."""
    rng = random.Random(seed)
    simulation = one_pair(
        seed, pages=48, rows=4, workers=2, verify_pages=rng.choice(list(VerifyPages))
    )
    sessions = [Conversation(simulation, str(n)) for n in range(6)]
    for number in range(5):
        for session in sessions:
            session.take()
            prefill = rng.choice(simulation.prefills)
            new = rng.choices(range(97), k=rng.randint(8, 24))
            worker = session.worker or rng.choice(simulation.decodes)
            session.say(new, 5, place=(prefill, worker), rewind_to=0 if number == 3 else None)
        simulation.run()
    for request in simulation.submitted:
        assert request.output == reference(request.prompt, request.max_tokens)
    assert sum(reads(one, "valid") for one in simulation.prefills) >= 5
    finish(simulation, *sessions)


@pytest.mark.parametrize("dies", ["prefill", "decode"])
@pytest.mark.parametrize("phase", [PrefillState.LOADING, PrefillState.LOADED])
def test_a_death_while_an_ordinary_request_is_read(phase: PrefillState, dies: str) -> None:
    """The next attempt has the same tokens, and no page of the survivor stays away."""
    simulation, conversation, prefill, decode = begun(is_session=False)
    turn = say(conversation)
    step_until(simulation, lambda: state(turn) is phase)
    simulation.kill(prefill if dies == "prefill" else decode)
    simulation._place = lambda *_: (simulation.prefills[0], simulation.decodes[0])  # type: ignore[method-assign]
    simulation.run()
    if not turn.output:  # its router submits it again
        simulation._attempt([turn])
        simulation.run()
    assert turn.output == reference(turn.prompt, 6)
    finish(simulation)


def test_what_the_prefill_worker_has_is_not_lent() -> None:
    """A prompt that both have is handed over as ever: nobody waits for a read, or is readable."""
    simulation = one_pair(5, pages=100)
    pair = prefill, decode = simulation.prefills[0], simulation.decodes[0]
    for last in range(3):
        one = Conversation(simulation, str(last), is_session=False)
        talk(one, [*FIRST[:24], last], 3, place=pair)
    assert decode.scheduler._histories._description is None
    assert reads(prefill, "valid") + reads(prefill, "not_needed") == 0
    finish(simulation)


def test_a_prompt_that_is_scored_is_lent_nothing() -> None:
    """The prefill worker computes all of it, whatever the decode worker has."""
    simulation, conversation, prefill, decode = begun(is_session=False)
    prompt = [*conversation.tokens, *DELTA]
    simulation.submit_choices(1, prompt, 6, prompt_logprobs=1, place=(prefill, decode))
    simulation.run()
    assert (read_from(simulation, decode), reads(prefill, "not_needed")) == (0, 0)
    finish(simulation)


def test_requests_that_share_a_conversation_read_it_once() -> None:
    """An agent's parallel calls: the others find what the first one has read."""
    simulation, conversation, prefill, decode = begun(is_session=False)
    turns = [
        simulation.submit([*conversation.tokens, *DELTA, last], 6, place=(prefill, decode))
        for last in range(4)
    ]
    simulation.run()
    for turn in turns:
        assert turn.output == reference(turn.prompt, 6)
    assert read_from(simulation, decode) == PAGES_KEPT - len(FIRST) // 4
    assert reads(prefill, "valid") == 1
    finish(simulation)
