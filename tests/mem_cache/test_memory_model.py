"""Random operations on every kind of pool: no page lost, none owned twice, none reused too early.

The reference is `tests.mem_cache.memory`: contents that tell whose they are.
`pytest --hypothesis-profile nightly tests/mem_cache` runs at least 200,000 operations.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvrelay.mem_cache.release import Outcome
from kvrelay.mem_cache.shape import PoolShape
from tests.known import known
from tests.mem_cache.memory import Holder, Memory

STEPS = 60
MAKE_TEST = settings(
    max_examples=50, stateful_step_count=STEPS, deadline=None, print_blob=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
KINDS = ("full", "hybrid", "window", "none")
AHEAD = 24


def make_pools(kind: str, page_size: int, pages: int, window: int) -> list[PoolShape]:
    full = PoolShape("full", pages)
    sliding = PoolShape("window", max(pages // 2, 1), window)
    return {"full": [full], "none": [full], "hybrid": [full, sliding], "window": [sliding]}[kind]


class MemoryMachine(RuleBasedStateMachine):
    """Requests and sessions come, compute, are announced, published and leave in any order."""

    @initialize(
        kind=st.sampled_from(KINDS),
        page_size=st.sampled_from([1, 3, 16, 64]),
        pages=st.integers(2, 40),
        rows=st.integers(1, 6),
        window=st.sampled_from([1, 2, 5, 16, 40]),
        long_row=st.sampled_from([2, 3, 8]),
        host=st.sampled_from([0, 3, 12, 40]),
        storage=st.booleans(),
    )
    def build(
        self,
        kind: str,
        page_size: int,
        pages: int,
        rows: int,
        window: int,
        long_row: int,
        host: int,
        storage: bool = False,
    ) -> None:
        pools = make_pools(kind, page_size, pages, window)
        self.longest = 12 * page_size
        self.refused: dict[object, int] = {}
        self.memory = Memory(
            pools,
            page_size,
            rows,
            self.longest,
            cached=kind != "none",
            ahead=AHEAD,
            long_row=long_row,
            # A window of one token sees no page.
            host_pages=host if kind == "full" or (kind != "none" and window > 1) else 0,
            storage=storage and kind == "full",
        )

    def pick(self, number: int) -> Holder:
        return self.memory.holders[number % len(self.memory.holders)]

    def prompt(self, base: int, shared: float, count: int, end: int) -> list[int]:
        cut = int(count * shared)
        return [base + 1] * cut + [7 + end] * (self.longest - cut)

    # A few prompts that share their beginnings, so that the tree has something to share.
    @rule(
        base=st.integers(0, 2),
        shared=st.floats(0, 1),
        length=st.floats(0.01, 1),
        output=st.integers(0, 8),
        namespace=st.sampled_from(["", "", "other"]),
        whole=st.booleans(),
    )
    def open(
        self, base: int, shared: float, length: float, output: int, namespace: str, whole: bool
    ) -> None:
        count = max(1, int(self.longest * length))
        tokens = self.prompt(base, shared, count, self.memory.opened % 2)
        promised = min(count + output, self.longest)
        known = count - (0 if whole else 1)
        version = self.memory.kv_cache.room_version
        opened = self.memory.open(tokens, promised, namespace, known=known)
        # A refusal is remembered as an engine does; what was refused is refused until it rises.
        asked = (tuple(tokens), promised, namespace, known)
        assert opened is None or self.refused.get(asked) != version, "there was room unannounced"
        if opened is None:
            self.refused[asked] = version

    @precondition(lambda self: self.memory.holders)
    @rule(number=st.integers(0), count=st.integers(1, AHEAD // 2))
    def compute(self, number: int, count: int) -> None:
        holder = self.pick(number)
        lease = holder.lease
        if any(not transfer.ended for transfer in holder.transfers):
            return
        # As the engine: no more than two forwards of one request, and none far beyond the slide.
        self.memory.slide(holder)
        if lease.kv_committed_len + count - holder.written > AHEAD:
            return
        if lease.kv_committed_len + count > self.longest:
            return
        promised = lease.kv_committed_len + count <= lease.promised_tokens
        computed = self.memory.compute(holder, count)
        assert computed or not promised, "a promise was broken"

    @precondition(lambda self: self.memory.holders)
    @rule(number=st.integers(0), publish=st.booleans())
    def run_through(self, number: int, publish: bool) -> None:
        """All of a request's tokens at once, so that there is something to share."""
        holder = self.pick(number)
        if any(not transfer.ended for transfer in holder.transfers):
            return
        while self.memory.forwards:
            self.memory.end_forward()
        self.run_to(holder, holder.lease.promised_tokens)
        if publish:
            self.memory.publish(holder)

    def run_to(self, holder: Holder, tokens: int) -> None:
        """Compute within the promise while nothing else runs."""
        while (left := tokens - holder.lease.kv_committed_len) > 0:
            self.memory.slide(holder)
            assert self.memory.compute(holder, min(left, AHEAD)), "a promise was broken"
            self.memory.end_forward()

    @precondition(lambda self: self.memory.holders)
    @rule(number=st.integers(0), share=st.floats(0.1, 1))
    def pull(self, number: int, share: float) -> None:
        holder = self.pick(number)
        lease = holder.lease
        if holder.last_step or holder.transfers or holder.written != lease.kv_committed_len:
            return
        room = lease.promised_tokens - lease.kv_committed_len
        if room > 0:
            assert self.memory.pull(holder, max(1, int(room * share))), "a promise was broken"

    @precondition(lambda self: self.memory.holders)
    @rule(
        number=st.integers(0),
        share=st.floats(0.1, 1),
        choices=st.sampled_from([1, 1, 2]),
        more=st.integers(0, 8),
    )
    def fork(self, number: int, share: float, choices: int, more: int) -> None:
        """The choices of a request, whose prompt is computed first if it is not."""
        holder = self.pick(number)
        lease = holder.lease
        if any(not transfer.ended for transfer in holder.transfers):
            return
        while self.memory.forwards:
            self.memory.end_forward()
        prompt = max(lease.kv_committed_len, int(share * lease.promised_tokens))
        self.run_to(holder, prompt)
        before = self.memory.kv_cache.audit.counts()
        state = [lease.cache_protected_len, lease.tables()]
        promised = min(self.longest, prompt + more)
        if self.memory.fork(holder, choices, promised) is None:
            assert self.memory.kv_cache.audit.counts() == before, "a refusal changed something"
            assert [lease.cache_protected_len, lease.tables()] == state

    @precondition(lambda self: self.memory.forwards)
    @rule()
    def end_forward(self) -> None:
        self.memory.end_forward()

    @precondition(lambda self: self.memory.others)
    @rule(number=st.integers(0))
    def end(self, number: int) -> None:
        self.memory.end(self.memory.others[number % len(self.memory.others)])

    @precondition(lambda self: self.memory.holders)
    @rule(number=st.integers(0))
    def announce(self, number: int) -> None:
        holder = self.pick(number)
        # A window's pages are announced with the last chunk, after which nothing slides.
        if all(shape.window is None for shape in self.memory.kv_cache.shape.pools):
            self.memory.announce(holder)

    @precondition(lambda self: self.memory.holders)
    @rule(number=st.integers(0))
    def publish(self, number: int) -> None:
        self.memory.publish(self.pick(number))

    @precondition(lambda self: self.memory.holders)
    @rule()
    def publish_settled(self) -> None:
        """Of all: so it happens that two have computed the same."""
        for holder in list(self.memory.holders):
            self.memory.publish_settled(holder)

    @precondition(lambda self: self.memory.holders)
    @rule(number=st.integers(0))
    def forget(self, number: int) -> None:
        self.memory.forget(self.pick(number))

    @precondition(lambda self: self.memory.holders)
    @rule(number=st.integers(0), outcome=st.sampled_from(list(Outcome)))
    def release(self, number: int, outcome: Outcome) -> None:
        holder = self.pick(number)
        pulled = all(transfer.ended for transfer in holder.transfers)
        if outcome is Outcome.SAVED and pulled:
            self.memory.save(holder)
        else:
            self.memory.release(holder, outcome if pulled else Outcome.ABORTED)

    @precondition(lambda self: self.memory.saved)
    @rule(
        number=st.integers(0), share=st.floats(0, 1), more=st.integers(0, 30), fresh=st.booleans()
    )
    def borrow(self, number: int, share: float, more: int, fresh: bool) -> None:
        holder = self.memory.saved[number % len(self.memory.saved)]
        low, high = holder.lease.cache_protected_len, holder.written
        prefix = low + int((high - low) * share)
        if not holder.lease.can_go_back(prefix):
            prefix = high
        promised = min(self.longest, prefix + more)
        before = self.memory.kv_cache.audit.page_counts()
        if not self.memory.borrow(holder, prefix, promised, fresh_boundary=fresh):
            assert self.memory.kv_cache.audit.page_counts() == before, "a refusal changed something"

    @precondition(lambda self: self.memory.holders)
    @rule(number=st.integers(0))
    def roll_back(self, number: int) -> None:
        holder = self.pick(number)
        if holder.borrowed is None:
            return
        # What has left a window since, or was published, cannot be had back.
        if holder.lease.can_go_back(holder.borrowed):
            self.memory.roll_back(holder)

    @precondition(lambda self: self.memory.saved)
    @rule(number=st.integers(0), outcome=st.sampled_from([Outcome.ABORTED, Outcome.FINISHED]))
    def close_session(self, number: int, outcome: Outcome) -> None:
        self.memory.release(self.memory.saved[number % len(self.memory.saved)], outcome)

    @rule()
    def reclaim(self) -> None:
        self.memory.reclaim()

    # The host tier

    @precondition(lambda self: self.memory.host.tier)
    @rule(
        base=st.integers(0, 2),
        shared=st.floats(0, 1),
        length=st.floats(0.01, 1),
        end=st.integers(0, 1),
        namespace=st.sampled_from(["", "", "other"]),
    )
    def bring_back(self, base: int, shared: float, length: float, end: int, namespace: str) -> None:
        count = max(1, int(self.longest * length))
        before = self.memory.kv_cache.audit.page_counts()
        tokens = self.prompt(base, shared, count, end)[:count]
        if not self.memory.host.bring_back(tokens, namespace):
            assert self.memory.kv_cache.audit.page_counts() == before, "a refusal changed something"

    @precondition(lambda self: self.memory.host.tier)
    @rule()
    def write_back(self) -> None:
        known(self.memory.host.tier).write_back()

    @precondition(lambda self: self.memory.host.copies)
    @rule()
    def copy(self) -> None:
        self.memory.host.copy()

    @precondition(lambda self: self.memory.host.copies)
    @rule()
    def finish_copy(self) -> None:
        self.memory.host.finish_copy()

    # Storage

    def has_storage(self) -> bool:
        return self.memory.host.tier is not None and self.memory.host.tier.storage is not None

    @precondition(has_storage)
    @rule(
        base=st.integers(0, 2),
        shared=st.floats(0, 1),
        length=st.floats(0.01, 1),
        end=st.integers(0, 1),
        namespace=st.sampled_from(["", "", "other"]),
    )
    def prefetch(self, base: int, shared: float, length: float, end: int, namespace: str) -> None:
        count = max(1, int(self.longest * length))
        self.memory.host.prefetch(self.prompt(base, shared, count, end)[:count], namespace)

    @precondition(lambda self: self.memory.store.orders)
    @rule(pick=st.integers(0, 5))
    def advance_storage(self, pick: int) -> None:
        self.memory.store.advance(pick)

    @precondition(lambda self: self.memory.store.orders)
    @rule()
    def begin_write_to_storage(self) -> None:
        self.memory.store.begin_write()

    @precondition(lambda self: self.memory.store.pages)
    @rule(pick=st.integers(0))
    def lose_from_storage(self, pick: int) -> None:
        self.memory.store.evict(pick)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "memory"):
            self.memory.check()

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.memory.drain()


TestMemoryModel = MemoryMachine.TestCase
if settings.get_current_profile_name() == "nightly":
    TestMemoryModel.settings = settings(MAKE_TEST, max_examples=settings().max_examples)
else:
    TestMemoryModel.settings = MAKE_TEST


@pytest.mark.slow
def test_many_more_walks() -> None:
    run_state_machine_as_test(MemoryMachine, settings=settings(MAKE_TEST, max_examples=500))
