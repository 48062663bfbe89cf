"""A cache manager with contents: every slot knows whose token was last written to it.

What a slot should hold is a number made of the namespace, the pool and all
tokens up to its own, so that a page that was reused too early, or found under
other tokens, is seen in what is read. Forwards, transfers and peers' reads are
in flight until they are ended; writes arrive as late as they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvrelay.mem_cache.fence import Fence, FenceKind, StepClock, StepFence
from kvrelay.mem_cache.host.storage_tier import StorageTier
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Lease, LeaseState
from kvrelay.mem_cache.leases.publishing import PageCopy
from kvrelay.mem_cache.prefix.prefix_log import PrefixLog
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.mem_cache.shape import PoolShape
from kvrelay.mem_cache.storage.storage_pages import StoreState
from kvrelay.wire.model_digest import NO_MODEL
from kvrelay.wire.page_hash import HASH_BYTES, PageHashes
from tests.known import known
from tests.mem_cache.host_model import HostModel
from tests.mem_cache.store_model import StoreModel
from tests.mem_cache.truth import truth_of


@dataclass(eq=False)
class InFlight:
    """A forward, a transfer or a peer's read; its own fence where it is no forward."""

    holder: Holder
    tables: list[np.ndarray]
    start: int
    end: int
    """It writes the tokens ``[start, end)``, at its very end."""
    reads: bool
    """It reads what the tokens from `start` on see, all the time."""
    life: str
    """The lease's holder when it began: a session's lease has several."""
    ended: bool = False
    copies: tuple[PageCopy, ...] = ()
    """Of pages, at its end, before it writes."""
    forked: dict[Holder, tuple[str, int]] = field(default_factory=dict)
    """Whose pages those are: with `life`, and what they have when they are copied."""
    kind: FenceKind = FenceKind.FORWARD

    def passed(self) -> bool:
        return self.ended


@dataclass(eq=False)
class Holder:
    """A request, or a session between requests, with the truth about its tokens."""

    tokens: list[int]
    namespace: str
    lease: Lease
    written: int
    """Tokens whose KV was written, by forwards and transfers that have ended."""
    last_step: int = 0
    borrowed: int | None = None
    """Tokens that a session's turn began with."""
    transfers: list[InFlight] = field(default_factory=list)
    peers: list[InFlight] = field(default_factory=list)

    def ids(self, count: int) -> np.ndarray:
        return np.asarray(self.tokens[:count], np.int32)


class Memory:
    """Operations on a cache manager as the schedulers use it, with the contents beside."""

    def __init__(
        self,
        pools: Sequence[PoolShape],
        page_size: int,
        rows: int,
        max_row_tokens: int,
        *,
        cached: bool = True,
        ahead: int = 64,
        long_row: int = 8,
        host_pages: int = 0,
        storage: bool = False,
    ) -> None:
        windows = [pool.window for pool in pools]
        self.hashes = PageHashes(NO_MODEL, page_size)
        log = PrefixLog(self.hashes)
        self.kv_cache = KVCacheManager(
            pools,
            page_size=page_size,
            total_rows=rows,
            max_row_tokens=max_row_tokens,
            ahead=ahead,
            index=RadixTree(page_size, windows, long_row=long_row, log=log) if cached else None,
        )
        self.page_size = page_size
        self.contents = [np.zeros((pool.total_pages, page_size), np.int64) for pool in pools]
        self.steps = StepClock()
        self.forwards: list[InFlight] = []
        self.others: list[InFlight] = []
        self.holders: list[Holder] = []
        self.saved: list[Holder] = []
        self.opened = 0
        self.host = HostModel(self, host_pages, log)
        """What is below the device, if anything is."""
        self.store = StoreModel(self)
        """What is below the host, if anything is."""
        if self.host.tier is not None and storage:
            speed, state = TierSpeed(1.0), StoreState(None)
            self.host.tier.storage = StorageTier(
                self.host.tier.pages, 2 << 20, self.store, speed, state, clock=lambda: 0.0
            )

    # What requests do

    def open(
        self, tokens: list[int], promised: int, namespace: str = "", known: int = -1
    ) -> Holder | None:
        self.opened += 1
        known = len(tokens) if known < 0 else known
        lease = self.kv_cache.open(
            f"r{self.opened}",
            promised,
            token_ids=np.asarray(tokens[:known], np.int32),
            namespace=namespace,
        )
        if lease is None:
            return None
        holder = Holder(list(tokens), namespace, lease, lease.cache_protected_len)
        self.holders.append(holder)
        return holder

    def compute(self, holder: Holder, count: int) -> bool:
        """Launch a forward over the next `count` tokens; False if memory is short."""
        lease = holder.lease
        start = lease.kv_committed_len
        if not self.kv_cache.grow(lease, start + count):
            return False
        self.kv_cache.commit(lease, start + count)
        holder.last_step = self.steps.launch()
        self.forwards.append(self._flight(holder, start, start + count, reads=True))
        return True

    def pull(self, holder: Holder, count: int) -> InFlight | None:
        """Begin to read the next `count` tokens' pages from a peer; None if memory is short."""
        lease = holder.lease
        start, end = lease.kv_committed_len, lease.kv_committed_len + count
        self.kv_cache.slide(lease, end)
        if not self.kv_cache.grow(lease, end):
            return None
        flight = self._flight(holder, start, end, reads=False)
        holder.transfers.append(flight)
        self.others.append(flight)
        return flight

    def announce(self, holder: Holder) -> None:
        """Let a peer read what is written."""
        flight = self._flight(holder, holder.written, holder.written, reads=True)
        holder.peers.append(flight)
        self.others.append(flight)

    def publish(self, holder: Holder) -> None:
        self.kv_cache.sharing.publish(
            holder.lease, holder.ids(holder.written), self.readers(holder)
        )

    def publish_settled(self, holder: Holder) -> bool:
        """What is written; the lease goes on, and whoever reads its pages does not notice."""
        before = [holder.lease.pages(pool) for pool in range(len(self.contents))]
        # An earlier turn's forward may still read what no token of this one sees.
        readers = self.readers(holder) if holder.borrowed is not None else []
        published = self.kv_cache.sharing.publish_settled(
            holder.lease, holder.ids(holder.written), readers
        )
        for pool, table in enumerate(before):
            now = holder.lease.pages(pool)
            kept = (now == table) | (now < 0)
            assert kept.all(), f"a page of {holder.lease!r} was replaced under its readers"
        return published

    def forget(self, holder: Holder) -> None:
        """Nobody else finds what it has published; it goes on, and so do others."""
        published = holder.ids(holder.lease.cache_protected_len)
        keys = self.hashes.extend(self.hashes.root(holder.namespace), published.tobytes())
        first = holder.lease.found_len // self.page_size * HASH_BYTES
        if self.host.tier is not None and first < len(keys):
            page = self.host.tier.pages._pages.get(keys[first : first + HASH_BYTES])
            self.host.forgotten += [] if page is None else page.subtree()
            size = first // HASH_BYTES * self.page_size + self.page_size
            self.store.taint(holder.namespace, holder.tokens[:size])
        self.kv_cache.forget(holder.lease, holder.ids(holder.written))

    def slide(self, holder: Holder) -> None:
        self.kv_cache.slide(holder.lease, holder.written)

    def release(self, holder: Holder, outcome: Outcome) -> None:
        """As the engine does; a peer's stream ends with its request."""
        if holder in self.saved:
            self.saved.remove(holder)
        else:
            self.holders.remove(holder)
        fences = self.readers(holder)
        for peer in holder.peers:
            self.end(peer)
        publish = holder.ids(holder.written)
        assert release_kv_cache(
            self.kv_cache, holder.lease, outcome, token_ids=publish, fences=fences
        )

    def save(self, holder: Holder) -> None:
        self.holders.remove(holder)
        for peer in holder.peers:
            self.end(peer)
        fences = self.readers(holder)
        assert release_kv_cache(self.kv_cache, holder.lease, Outcome.SAVED, fences=fences)
        self.saved.append(holder)

    def borrow(
        self, holder: Holder, prefix_len: int, promised: int, *, fresh_boundary: bool = False
    ) -> bool:
        lent = self.kv_cache.leases.borrow(
            holder.lease,
            holder.lease.holder + "'",
            prefix_len,
            promised,
            fresh_boundary=fresh_boundary,
        )
        if lent:
            self.saved.remove(holder)
            self.holders.append(holder)
            holder.borrowed = prefix_len
            holder.written = min(holder.written, holder.lease.kv_committed_len)
        return lent

    def roll_back(self, holder: Holder) -> None:
        """The turn fails; what it began with is there as before."""
        for peer in holder.peers:
            self.end(peer)
        self.kv_cache.leases.roll_back(holder.lease, known(holder.borrowed), self.pending(holder))
        holder.written = known(holder.borrowed)
        self.save(holder)

    def pending(self, holder: Holder) -> list[Fence]:
        return [fence for fence in self.readers(holder) if not fence.passed()]

    def readers(self, holder: Holder) -> list[Fence]:
        step = StepFence(self.steps, holder.last_step)
        return [step, *holder.transfers, *holder.peers]

    def fork(self, holder: Holder, number: int, promised: int) -> list[Holder] | None:
        """Open leases of the same tokens so far; launch the forward that copies, if any is to."""
        length = holder.written
        self.opened += number
        forked = self.kv_cache.sharing.fork(
            holder.lease,
            [f"r{self.opened - one}" for one in range(number)],
            holder.ids(length),
            promised,
            copied=StepFence(self.steps, self.steps.launched + 1),
            pending=self.pending(holder),
        )
        if forked is None:
            return None
        copying = self._flight(holder, length, length, reads=True)
        copying.copies = forked.copies
        if forked.copies:
            self.steps.launch()
            self.forwards.append(copying)
        children = []
        for one, lease in enumerate(forked.leases):
            tokens = [*holder.tokens[:length], *(100 + one for _ in holder.tokens[length:])]
            there = length if not forked.copies else lease.cache_protected_len
            child = Holder(tokens, holder.namespace, lease, there)
            children.append(child)
            copying.forked[child] = (lease.holder, length)
        self.holders += children
        return children

    # What ends by itself

    def end_forward(self) -> None:
        """The oldest forward ends: it reads and writes."""
        forward = self.forwards.pop(0)
        self.check_reads(forward)
        for pool, source, target in forward.copies:
            self.contents[pool][target] = self.contents[pool][source]
        self._write(forward)
        self.steps.end()
        if not forward.forked:
            self._record_written(forward.holder, forward.life, forward.end)
        for child, (life, end) in forward.forked.items():
            self._record_written(child, life, max(child.written, end))

    def _record_written(self, holder: Holder, life: str, end: int) -> None:
        if holder.lease.state is LeaseState.OPEN and life == holder.lease.holder:
            holder.written = end

    def end(self, flight: InFlight) -> None:
        """A transfer or a peer's read ends."""
        if flight.ended:
            return
        if flight.reads:
            self.check_reads(flight)
        self._write(flight)
        flight.ended = True
        self.others.remove(flight)
        lease = flight.holder.lease
        if not flight.reads and lease.state is LeaseState.OPEN and flight.life == lease.holder:
            self.kv_cache.commit(lease, flight.end)
            flight.holder.written = flight.end

    def reclaim(self) -> None:
        self.kv_cache.allocator.reclaim()

    # What must hold

    def check(self) -> None:
        """Conservation, page by page, and the contents of all that anybody may read."""
        self.kv_cache.audit.check_pages()
        if self.host.tier is not None:
            self.host.check()
        for holder in [*self.holders, *self.saved]:
            if not all(transfer.ended for transfer in holder.transfers):
                continue  # its window is where the transfer ends, its contents are not there yet
            view = self._flight(holder, holder.written, holder.written, reads=True)
            self.check_reads(view)
        for flight in self.others:
            if flight.reads:
                self.check_reads(flight)
        for flight in [*self.forwards, *self.others]:
            self.check_not_free(flight)
        unwritten: dict[Holder, int] = {}
        for forward in self.forwards:
            for child in forward.forked:
                unwritten[child] = child.written
            first = min(forward.start, unwritten.get(forward.holder, forward.start))
            unwritten[forward.holder] = first
            self.check_reads(forward, first)

    def check_index(self) -> None:
        """What the prefix index has is what was written for its tokens, even if nobody reads it."""
        index = self.kv_cache.index
        assert isinstance(index, RadixTree)
        for leaf in index._forest.nodes():
            path = list(leaf.path())[::-1]
            if leaf.children or path[0].parent is None:
                continue
            tokens = np.concatenate([node.tokens for node in path]).tolist()
            for pool, contents in enumerate(self.contents):
                truth = truth_of(path[0].parent.key.decode(), pool, tokens)
                for node in path:
                    if (pages := node.pages[pool]) is not None:
                        held = contents[pages].ravel()
                        assert (held == truth[node.depth : node.end]).all(), (
                            "a cached page is wrong"
                        )

    def check_reads(self, flight: InFlight, written: int | None = None) -> None:
        """What a token at `flight.start` sees is what was written for its request.

        As far as it is `written`: an earlier forward may have to end first.
        """
        last = flight.start if written is None else written
        for pool, shape in enumerate(self.kv_cache.shape.pools):
            first = 0 if shape.window is None else max(0, flight.start - shape.window + 1)
            if first >= last:
                continue
            at = np.arange(first, last)
            pages = flight.tables[pool][at // self.page_size]
            assert (pages >= 0).all(), f"{flight.holder.lease!r} lacks {shape.name} pages it sees"
            found = self.contents[pool][pages, at % self.page_size]
            wrong = found != self._truth(flight.holder, pool, last)[first:]
            assert not wrong.any(), (
                f"token {at[wrong][0]} of {flight.holder.lease!r} is not its own"
            )

    def check_not_free(self, flight: InFlight) -> None:
        """Nobody can be given the pages that `flight` copies or has yet to write."""
        for pool, table in enumerate(flight.tables):
            written = slice(flight.start // self.page_size, -(-flight.end // self.page_size))
            pages = [page for copy in flight.copies if copy.pool == pool for page in copy[1:]]
            pages += [page for page in table[written].tolist() if page >= 0]
            free = set(self.kv_cache.allocator.accounts[pool].free_pages.tolist())
            assert free.isdisjoint(pages), f"of {pages} some are free, {flight.life} runs"

    def drain(self) -> None:
        """End everything; then nothing may be left but what the index keeps."""
        for holder in [*self.holders, *self.saved]:
            self.release(holder, Outcome.ABORTED)
        while self.forwards:
            self.end_forward()
        for flight in list(self.others):
            self.end(flight)
        while self.host.lent:
            self.host.end_lending(0)
        while self.host.copies or self.store.orders:
            while self.host.copies:
                self.host.finish_copy()
            while self.store.orders:
                self.store.advance()
        self.reclaim()
        self.check()
        for pool, counts in enumerate(self.kv_cache.audit.page_counts()):
            assert counts.free + counts.cached_evictable == counts.total
            assert counts.promised == 0
            assert self.kv_cache.index.evictable(pool) == self.kv_cache.index.size(pool)
        rows = self.kv_cache.audit.row_counts()
        assert rows.free == rows.total
        if self.host.tier is not None:
            for counts in self.host.tier.pages.pool_counts():
                assert counts.free + counts.cached_evictable == counts.total

    # Inside

    def _flight(self, holder: Holder, start: int, end: int, *, reads: bool) -> InFlight:
        tables = [holder.lease.pages(pool) for pool in range(len(self.contents))]
        return InFlight(holder, tables, start, end, reads, holder.lease.holder)

    def _write(self, flight: InFlight) -> None:
        if flight.start == flight.end:
            return
        at = np.arange(flight.start, flight.end)
        for pool, contents in enumerate(self.contents):
            pages = flight.tables[pool][at // self.page_size]
            here = pages >= 0
            truth = self._truth(flight.holder, pool, flight.end)[flight.start :]
            contents[pages[here], (at % self.page_size)[here]] = truth[here]

    def _truth(self, holder: Holder, pool: int, count: int) -> np.ndarray:
        """What the slots of a request's first `count` tokens should hold in a pool."""
        return truth_of(holder.namespace, pool, holder.tokens[:count])
