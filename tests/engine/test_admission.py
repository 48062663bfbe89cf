"""Which requests are admitted, how a step's tokens are divided, and what is left for growth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.scheduler.admit_in_turn import AdmissionInTurn
from kvrelay.engine.scheduler.context import SchedulerContext
from kvrelay.engine.scheduler.growth_reserve import GrowthReserve
from kvrelay.engine.scheduler.metrics import WorkerMetrics
from kvrelay.engine.scheduler.outbox import Outbox, RouterLink
from kvrelay.engine.scheduler.prompts_in_progress import share_budget
from kvrelay.engine.scheduler.request import Request
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.mem_cache.shape import PoolShape
from kvrelay.wire.submit import RequestKey, StopConditions
from kvrelay.wire.worker_info import WorkerRole
from tests.engine.submissions import submit
from tests.known import known


def kv_cache(pages: int = 100) -> KVCacheManager:
    shapes = [PoolShape("full", pages)]
    return KVCacheManager(shapes, page_size=4, total_rows=8, max_row_tokens=400)


def scheduler_context() -> SchedulerContext[Request]:
    config = WorkerConfig("w", WorkerRole.PREFILL, None, "sim")  # type: ignore[arg-type]
    outbox = Outbox(lambda function, *args: function(*args))
    return SchedulerContext(kv_cache(), outbox, WorkerMetrics(config))


def request(
    number: int = 0,
    *,
    prompt: int = 4,
    most: int = 40,
    priority: int = 0,
    choices: int = 1,
    open_ended: bool = False,
) -> Request:
    command = submit(
        RouterLink("router"),
        RequestKey("router", str(number), 1),
        [1] * prompt,
        StopConditions(max_tokens=most),
        n=choices,
        priority=priority,
        arrived=float(number),
        open_ended=open_ended,
    )
    return Request.of(command)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 2)), min_size=1, max_size=12),
    budget=st.integers(1, 64),
)
def test_a_budget_is_shared_without_waste_and_half_goes_to_whose_turn_it_is(lengths, budget):
    left = {
        request(number, priority=priority): length
        for number, (length, priority) in enumerate(lengths)
    }
    shares = share_budget(left, budget)
    assert sum(tokens for _, tokens in shares) == min(budget, sum(left.values()))
    assert all(0 < tokens <= left[one] for one, tokens in shares)
    first = min(left, key=lambda r: r.turn)
    assert shares[0][0] is first
    assert shares[0][1] >= min(left[first], (budget + 1) // 2)
    assert [one.turn for one, _ in shares] == sorted(one.turn for one, _ in shares)


def test_a_long_prompt_lets_short_ones_through_and_still_ends():
    long, left, steps = request(0), {}, 0
    left[long] = 1000
    number = 0
    while long in left:
        # Two short prompts come with every step: more than the budget's other half.
        for _ in range(2):
            number += 1
            left[request(number)] = 40
        shares = share_budget(left, 64)
        assert len(shares) > 1
        for one, tokens in shares:
            left[one] -= tokens
        left = {one: tokens for one, tokens in left.items() if tokens}
        steps += 1
    assert steps <= 1000 / 32 + 1


def test_prompts_of_one_length_end_one_after_the_other():
    first, second = request(0), request(1)
    left, steps = {first: 128, second: 128}, []
    while left:
        shares = dict(share_budget(left, 48))
        steps.append([shares.get(first, 0), shares.get(second, 0)])
        left = {one: rest for one in left if (rest := left[one] - shares.get(one, 0))}
    assert steps[:3] == [[48, 0], [48, 0], [32, 16]]
    assert steps[3:] == [[0, 48], [0, 48], [0, 16]]


def test_a_misfit_is_bypassed_so_many_times_and_no_more():
    context = scheduler_context()
    account = context.kv_cache
    large, small = request(0), [request(number) for number in range(1, 9)]
    fits, held = {*small}, known(account.open("room that comes back", 8))
    admission = AdmissionInTurn(context, lambda one: one in fits, bypass_limit=3)
    assert list(admission.admit([large, *small])) == small[:3]
    assert list(admission.admit([large, *small[3:]])) == []
    fits.add(large)
    release_kv_cache(account, held, Outcome.ABORTED)
    waiting = [large, *small[3:]]
    assert list(admission.admit(waiting)) == waiting


def test_who_was_refused_is_not_asked_again_until_there_is_room():
    context, asked = scheduler_context(), []
    account = context.kv_cache

    def refuse(one: Request) -> bool:
        asked.append(one)
        return False

    admission = AdmissionInTurn(context, refuse, 3)
    waiting, held = [request(0)], known(account.open("holder", 40))
    for _ in range(3):
        assert list(admission.admit(waiting)) == []
    assert len(asked) == 1
    release_kv_cache(account, held, Outcome.ABORTED)
    assert list(admission.admit(waiting)) == []
    assert len(asked) == 2


def test_priority_and_age_decide_whose_turn_it_is():
    late, urgent, early = request(2), request(3, priority=-1), request(1)
    admission = AdmissionInTurn(scheduler_context(), lambda _: True, 3)
    assert list(admission.admit([late, urgent, early])) == [urgent, early, late]


@pytest.mark.parametrize(("least", "most"), [(0.0, 1.0), (0.3, 0.6), (1.0, 1.0)])
def test_the_reserve_learns_lengths_within_its_bounds(least, most):
    reserve = GrowthReserve(kv_cache(), least, most)
    one = request(most=100)
    assert reserve.tokens(one) == max(1, round(100 * most))
    short = request(most=100)
    short.output_ids = [1] * 10
    assert reserve.mean_output_tokens == 0
    reserve.learn_from_finish(short)
    assert reserve.mean_output_tokens == 10
    for _ in range(200):
        reserve.learn_from_finish(short)
    assert reserve.tokens(one) == pytest.approx(max(10, 100 * least), abs=1)
    low = reserve.tokens(one)
    for _ in range(20):
        reserve.learn_from_retraction()
    assert reserve.tokens(one) == max(1, round(100 * most))
    assert reserve.tokens(one) >= low
    one.output_ids = [1] * 99
    assert reserve.tokens(one) == 1


def test_chats_without_a_limit_leave_as_much_room_for_others_as_with_one():
    def chats(most: int, *, open_ended: bool) -> list[Request]:
        return [request(number, most=most, open_ended=open_ended) for number in range(32)]

    bounded, unbounded = chats(256, open_ended=False), chats(8000, open_ended=True)
    reserve = GrowthReserve(kv_cache(), 0.1, 1.0)
    assert reserve.pages(unbounded) == reserve.pages(bounded)
    short = request(most=8000, open_ended=True)
    short.output_ids = [1] * 40
    for _ in range(100):
        reserve.learn_from_finish(short)
    assert reserve.tokens(unbounded[0]) == pytest.approx(40, abs=1)
    assert reserve.tokens(bounded[0]) == 256, "others are not taken for as short"
    for _ in range(100):
        reserve.learn_from_retraction()
    assert reserve.tokens(unbounded[0]) == kv_cache().max_lease_tokens


def test_the_reserve_counts_pages_that_are_not_there_yet():
    account = kv_cache()
    reserve = GrowthReserve(account, 1.0, 1.0)
    waiting = request(prompt=6, most=11)
    # 6 + 10 tokens are 4 pages; the prompt's own 2 are reserved with it.
    assert reserve.pages([waiting]) == [2]
    lease = waiting.lease = known(account.open("waiting", 6))
    assert account.grow(lease, 12)
    assert reserve.pages([waiting]) == [1]
    # Each of three choices has two pages more, and two of them a copy of the prompt's last.
    assert reserve.pages([request(prompt=6, most=11, choices=3)]) == [3 * 2 + 2]


def test_nothing_is_left_for_one_that_is_alone():
    reserve = GrowthReserve(kv_cache(pages=10), 1.0, 1.0)
    several = request(choices=8)
    assert reserve.pages([several]) > [10]
    assert reserve.headroom(several, []) is None
    assert reserve.headroom(several, [request(1)]) == reserve.pages([request(1), several])


@pytest.mark.parametrize(("written", "committed"), [(-1, 0), (5, 4), (7, 7), (4, 7)])
def test_lengths_that_are_not_as_drawn_are_found(written: int, committed: int) -> None:
    """Of a request of six tokens."""
    memory, one = kv_cache(), request(prompt=6)
    one.lease = known(memory.open("holder", 8))
    assert memory.grow(one.held, 8)
    memory.commit(one.held, 6)
    one.kv_written_len = 5
    one.check_lengths()
    memory.lengths.trim(one.held, committed) if committed < 6 else memory.commit(
        one.held, committed
    )
    one.kv_written_len = written
    with pytest.raises(AssertionError, match="tokens written"):
        one.check_lengths()
