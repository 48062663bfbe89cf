"""Random operations against plain sets: no page lost, none owned twice, none reused too early."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.mem_cache.fence import StepClock, StepFence
from kvrelay.mem_cache.lease import Lease
from kvrelay.mem_cache.ledger import Ledger
from kvrelay.mem_cache.release import Outcome, release_kv_cache


class LedgerMachine(RuleBasedStateMachine):
    """Requests come, grow and leave in any order while forwards run and end."""

    @initialize(
        page_size=st.sampled_from([1, 3, 16]), pages=st.integers(1, 24), rows=st.integers(1, 5)
    )
    def build(self, page_size: int, pages: int, rows: int) -> None:
        self.ledger = Ledger(
            total_pages=pages, page_size=page_size, total_rows=rows, max_row_tokens=400
        )
        self.steps = StepClock()
        self.leases: list[Lease] = []
        self.promises: dict[Lease, int] = {}
        self.fenced: list[tuple[int, set[int]]] = []
        self.opened = 0

    @rule(tokens=st.integers(1, 200))
    def open(self, tokens: int) -> None:
        self.opened += 1
        lease = self.ledger.open(f"r{self.opened}", tokens)
        if lease is not None:
            self.leases.append(lease)
            self.promises[lease] = tokens

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0), tokens=st.integers(1, 220))
    def grow(self, pick: int, tokens: int) -> None:
        lease = self.leases[pick % len(self.leases)]
        held = lease.num_pages
        before = lease.kv_allocated_len
        grown = self.ledger.grow(lease, tokens)
        assert grown or tokens > self.promises[lease], "a promise was broken"
        assert lease.kv_allocated_len == (max(before, tokens) if grown else before)
        new = set(lease.pages[held:].tolist())
        assert all(not new & pages for _, pages in self.fenced), "reused while still read"

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0), share=st.floats(0, 1))
    def commit(self, pick: int, share: float) -> None:
        lease = self.leases[pick % len(self.leases)]
        room = lease.kv_allocated_len - lease.kv_committed_len
        self.ledger.commit(lease, lease.kv_committed_len + int(room * share))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0), outcome=st.sampled_from(list(Outcome)), read=st.booleans())
    def release(self, pick: int, outcome: Outcome, read: bool) -> None:
        lease = self.leases.pop(pick % len(self.leases))
        running = self.steps.launched > self.steps.settled
        if read and running:
            self.fenced.append((self.steps.launched, set(lease.own_pages)))
        fences = [StepFence(self.steps, self.steps.launched)] if read else []
        assert release_kv_cache(self.ledger, lease, outcome, fences=fences)

    @rule()
    def launch(self) -> None:
        self.steps.launch()

    @precondition(lambda self: self.steps.launched > self.steps.settled)
    @rule()
    def settle(self) -> None:
        self.steps.settle()

    @rule()
    def reclaim(self) -> None:
        self.ledger.reclaim()
        self.fenced = [entry for entry in self.fenced if entry[0] > self.steps.settled]

    @invariant()
    def conserves(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.audit_pages()
        owned = [page for lease in self.leases for page in lease.pages.tolist()]
        assert len(owned) == len(set(owned)), "two requests share a page"
        assert self.ledger.page_counts().held == len(owned)

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for lease in self.leases:
            release_kv_cache(
                self.ledger,
                lease,
                Outcome.ABORTED,
                fences=[StepFence(self.steps, self.steps.launched)],
            )
        while self.steps.settled < self.steps.launched:
            self.steps.settle()
        self.ledger.reclaim()
        self.ledger.audit_pages()
        assert self.ledger.page_counts().free == self.ledger.total_pages
        assert self.ledger.row_counts().free == self.ledger.total_rows


TestLedgerModel = LedgerMachine.TestCase
TestLedgerModel.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
