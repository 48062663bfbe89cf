"""What the account of KV memory costs: leases, the prefix index, and a decode step's share.

python -m benchmarks.memory

No bytes are moved: this is the bookkeeping alone, on the thread that runs the
engine. (What moving and converting pages costs: `benchmarks.memory_convert`.)

- Leases: one of 2,000 tokens is opened and grown, then released unpublished.
- Prefix index: 1,500 prefixes of 2,000 tokens, of which ten at a time begin with
  the same 1,000. A prompt of 4,096 tokens is looked up, and the lock that it
  gets is undone; a prefix is inserted, half of it known; a leaf is evicted.
- Decode steps: 256 requests and those prefixes fill a pool, so that what a
  request gains is taken from the prefix index. A step does what an engine does
  to its account from one forward to the next: `slide_all`, `reclaim`,
  `grow_all`, `commit_all`, `page_tables`, `audit` and `counts`. A request
  needs a new page every 16 steps; when is random, so that it is 16 of them a
  step on average, or the same for all (`aligned`), which makes one step of
  16 as bad as it can be. `hybrid` has a second pool, with a window of 1,024 tokens.

A repetition is 64 steps in a row, or as many calls, and its figure their mean;
a worst step is the slowest of its 64. The repetitions of everything are
interleaved, so that all see the same machine; one more comes first and does not
count. The table has medians and minima over the repetitions. The bar is for the
median, for a machine that does nothing else.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

import click
import numpy as np

from kvrelay.deploy.load_generator.table import table
from kvrelay.mem_cache.fence import StepClock, StepFence
from kvrelay.mem_cache.kv_cache_manager import KVCacheManager
from kvrelay.mem_cache.leases.lease import Batch, Lease
from kvrelay.mem_cache.prefix.prefix_index import TokenIds
from kvrelay.mem_cache.prefix.radix_tree import RadixTree
from kvrelay.mem_cache.release import Outcome, release_kv_cache
from kvrelay.mem_cache.shape import PoolShape

MATCH_BAR_US = 200.0
STEP_BAR_US = 300.0

PAGE_SIZE = 16
WINDOW = 1024


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    total_pages: int = 200_000
    prefixes: int = 1_500
    sharing: int = 10
    """Prefixes that have their first half in common."""
    prefix_tokens: int = 2_000
    prompt_tokens: int = 4_096
    turns: int = 16
    """Of the chat that a prompt may be the whole of: it lies in as many nodes."""
    requests: int = 256
    calls: int = 64
    """Of each kind in a repetition; also the steps in a row."""


@dataclass(frozen=True)
class Figure:
    """Microseconds of one call, over the repetitions."""

    work: str
    median_us: float
    min_us: float
    bar_us: float | None = None

    @property
    def calls_per_s(self) -> float:
        """At the median."""
        return 1e6 / self.median_us

    @property
    def ratio(self) -> float | None:
        """Of the median to the bar."""
        return None if self.bar_us is None else self.median_us / self.bar_us

    @property
    def meets_bar(self) -> bool:
        """Also if it has none."""
        return self.ratio is None or self.ratio < 1


class Stopwatch:
    """Seconds that kinds of work took, call by call."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def measure(self, work: str) -> Iterator[None]:
        """Time what is done inside."""
        start = time.perf_counter()
        yield
        self.seconds[work].append(time.perf_counter() - start)


class Work(Protocol):
    """Something to be measured, again and again."""

    bars: dict[str, float]
    """Microseconds that kinds of work may take."""

    def run(self, watch: Stopwatch) -> None:
        """One repetition."""
        ...


class Prompts:
    """Random tokens, the same in every run."""

    def __init__(self, sizes: Sizes) -> None:
        self._random = np.random.default_rng(0)
        self._sizes = sizes

    def some(self, tokens: int) -> TokenIds:
        """As many tokens."""
        return self._random.integers(0, 32_000, tokens, dtype=np.int32)

    def prefixes(self, number: int) -> list[TokenIds]:
        """Half of each is shared with `Sizes.sharing` - 1 others."""
        half = self._sizes.prefix_tokens // 2
        shared = [self.some(half) for _ in range(-(-number // self._sizes.sharing))]
        return [
            self.continued(shared[index // self._sizes.sharing], self._sizes.prefix_tokens)
            for index in range(number)
        ]

    def continued(self, token_ids: TokenIds, tokens: int) -> TokenIds:
        """`token_ids` and others, as many tokens in all."""
        return np.concatenate([token_ids, self.some(tokens - len(token_ids))])


class LeaseWork:
    """Opening, growing and releasing leases, with nothing in the prefix index."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._kv_cache = _make_kv_cache(sizes, [None], sizes.prefix_tokens)
        tokens, pages = sizes.prefix_tokens, self._kv_cache.shape.pages_for(sizes.prefix_tokens)
        self._allocate = f"allocate: open and grow a lease to {tokens} tokens, {pages} pages"
        self.bars: dict[str, float] = {}

    def run(self, watch: Stopwatch) -> None:
        """See `Work`."""
        for number in range(self._sizes.calls):
            tokens = self._sizes.prefix_tokens
            with watch.measure(self._allocate):
                lease = self._kv_cache.open(f"request {number}", tokens)
                assert lease is not None
                self._kv_cache.grow(lease, tokens)
            with watch.measure("release it"):
                release_kv_cache(self._kv_cache, lease, Outcome.ABORTED)


class TreeWork:
    """The prefix index by itself; every insertion is made up for by an eviction.

    The prefixes that are looked up stay, as long as there are twice as many:
    others have gone unused for longer.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._prompts = Prompts(sizes)
        self._tree = RadixTree(PAGE_SIZE, [None])
        known = self._prompts.prefixes(sizes.prefixes)
        for token_ids in known:
            self._insert(token_ids)
        chosen = known[:: -(-len(known) // sizes.calls)]
        self._begun = [self._prompts.continued(ids, sizes.prompt_tokens) for ids in chosen]
        self._chat = self._prompts.some(sizes.prompt_tokens)
        for turn in range(1, sizes.turns + 1):
            self._insert(self._chat[: turn * sizes.prompt_tokens // sizes.turns])
        match = f"match {sizes.prompt_tokens} tokens"
        self._match_begun = f"{match}, {sizes.prefix_tokens} of them cached"
        self._match_chat = f"{match}, all cached in {sizes.turns} turns"
        self.bars = {self._match_begun: MATCH_BAR_US, self._match_chat: MATCH_BAR_US}

    def run(self, watch: Stopwatch) -> None:
        """See `Work`."""
        for token_ids in self._begun:
            self._match(watch, self._match_begun, token_ids, self._sizes.prefix_tokens)
            self._match(watch, self._match_chat, self._chat, self._sizes.prompt_tokens)
        half = self._sizes.prefix_tokens // 2
        before = self._tree.size(0)
        tokens = self._sizes.prefix_tokens
        for token_ids in self._begun:
            fresh = self._prompts.continued(token_ids[:half], tokens)
            with watch.measure(f"insert {tokens} tokens, {half} of them known, and unlock"):
                self._insert(fresh)
        pages = tokens // PAGE_SIZE - half // PAGE_SIZE
        while self._tree.size(0) > before:
            with watch.measure(f"evict a leaf of {pages} pages"):
                self._tree.evict(0, pages)

    def _match(self, watch: Stopwatch, work: str, token_ids: TokenIds, cached: int) -> None:
        with watch.measure(work):
            lock = self._tree.match(token_ids)
        assert lock.num_pages == cached // PAGE_SIZE
        with watch.measure(f"unlock {self._sizes.prompt_tokens} tokens or fewer"):
            self._tree.unlock(lock)

    def _insert(self, token_ids: TokenIds) -> None:
        # Which pages they are is all the same to the tree.
        pages = np.arange(len(token_ids) // PAGE_SIZE, dtype=np.int32)
        self._tree.unlock(self._tree.insert(token_ids, [pages]).lock)


class StepWork:
    """Decode steps on a pool that is full.

    Args:
        name: in the table.
        sizes: how many requests, prefixes and pages.
        steps: that will be done in all.
        windows: for each pool.
        aligned: all requests need their new pages at the same step.
    """

    def __init__(
        self, name: str, sizes: Sizes, steps: int, windows: Sequence[int | None], *, aligned: bool
    ) -> None:
        self._name = name
        self._sizes = sizes
        longest = 2 * sizes.total_pages * PAGE_SIZE // sizes.requests + steps
        self._kv_cache = _make_kv_cache(sizes, windows, longest)
        for token_ids in Prompts(sizes).prefixes(sizes.prefixes):
            lease = self._open("prefix", len(token_ids), len(token_ids))
            release_kv_cache(self._kv_cache, lease, Outcome.FINISHED, token_ids=token_ids)
        self._quarantine_something()
        self._leases = Batch(
            self._open(f"request {number}", tokens, tokens + steps)
            for number, tokens in enumerate(self._lengths(aligned=aligned))
        )
        self._step = f"decode step, {name}"
        self.bars = {self._step: STEP_BAR_US}

    def run(self, watch: Stopwatch) -> None:
        """See `Work`."""
        seconds = []
        for _ in range(self._sizes.calls):
            parts = self._one_step()
            for part, taken in parts.items():
                watch.seconds[f"{part}, {self._name}"].append(taken)
            seconds.append(sum(parts.values()))
        watch.seconds[self._step] += seconds
        watch.seconds[f"worst step, {self._name}"].append(max(seconds))

    def _one_step(self) -> dict[str, float]:
        """Seconds of each part; what the engine keeps beside its account is not among them."""
        kv_cache, leases = self._kv_cache, self._leases
        settled = kv_cache.lengths.committed(leases)
        goals = settled + 1
        parts: list[tuple[str, Callable[[], object]]] = [
            ("slide_all", lambda: kv_cache.lengths.slide(leases, settled)),
            ("reclaim", kv_cache.allocator.reclaim),
            ("grow_all", lambda: kv_cache.lengths.grow(leases, goals)),
            ("commit_all", lambda: kv_cache.lengths.commit(leases, goals)),
            ("page_tables", lambda: kv_cache.lengths.page_tables(leases)),
            ("audit", kv_cache.audit.check),
            ("counts", kv_cache.audit.counts),
        ]
        seconds = {}
        for name, part in parts:
            start = time.perf_counter()
            part()
            seconds[name] = time.perf_counter() - start
        assert leases[0].kv_committed_len == goals[0]
        return seconds

    def _open(self, holder: str, tokens: int, promised: int) -> Lease:
        """A lease of as many tokens as a decode worker has one once a prompt is pulled."""
        lease = self._kv_cache.open(holder, promised)
        assert lease is not None, "the sizes do not fit one another"
        self._kv_cache.slide(lease, tokens)
        self._kv_cache.grow(lease, tokens)
        self._kv_cache.commit(lease, tokens)
        return lease

    def _quarantine_something(self) -> None:
        """What four requests left behind; the forward that they wait for does not end."""
        fence = StepFence(StepClock(), 1)
        for number in range(4):
            lease = self._open(f"gone {number}", PAGE_SIZE, PAGE_SIZE)
            release_kv_cache(self._kv_cache, lease, Outcome.ABORTED, fences=[fence])

    def _lengths(self, *, aligned: bool) -> list[int]:
        """Tokens of each request; together they fill what the prefixes leave of the first pool."""
        chance = random.Random(0)
        weights = [chance.uniform(0.5, 1.5) for _ in range(self._sizes.requests)]
        tokens = self._kv_cache.audit.page_counts()[0].free * PAGE_SIZE / sum(weights)
        lengths = [int(weight * tokens) for weight in weights]
        return [length // PAGE_SIZE * PAGE_SIZE if aligned else length for length in lengths]


def _make_kv_cache(
    sizes: Sizes, windows: Sequence[int | None], max_row_tokens: int
) -> KVCacheManager:
    """Pools of the same size, for as many rows as there are requests and some more."""
    return KVCacheManager(
        [
            PoolShape("full" if window is None else "window", sizes.total_pages, window)
            for window in windows
        ],
        page_size=PAGE_SIZE,
        total_rows=sizes.requests + 8,
        max_row_tokens=max_row_tokens,
        ahead=1,
        index=RadixTree(PAGE_SIZE, windows),
    )


def measure(sizes: Sizes, repetitions: int) -> list[Figure]:
    """Measure everything, as the module says."""
    steps = (1 + repetitions) * sizes.calls
    works: list[Work] = [
        LeaseWork(sizes),
        TreeWork(sizes),
        StepWork("full", sizes, steps, [None], aligned=False),
        StepWork("full, aligned", sizes, steps, [None], aligned=True),
        StepWork("hybrid", sizes, steps, [None, WINDOW], aligned=False),
        StepWork("hybrid, aligned", sizes, steps, [None, WINDOW], aligned=True),
    ]
    means: dict[str, list[float]] = defaultdict(list)
    for repetition in range(1 + repetitions):
        for work in works:
            watch = Stopwatch()
            work.run(watch)
            if repetition:
                for name, seconds in watch.seconds.items():
                    means[name].append(1e6 * statistics.fmean(seconds))
    bars = {name: bar for work in works for name, bar in work.bars.items()}
    return [
        Figure(name, statistics.median(some), min(some), bars.get(name))
        for name, some in means.items()
    ]


@click.command(context_settings={"show_default": True})
@click.option("--repetitions", type=click.IntRange(min=1), default=15, help="Of everything.")
@click.option("--quick", is_flag=True, help="Three repetitions.")
@click.option("--check", is_flag=True, help="Exit with 1 if a bar is missed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(repetitions: int, quick: bool, check: bool, as_json: bool) -> None:
    """Print what the account of KV memory costs."""
    sizes = Sizes()
    figures = measure(sizes, 3 if quick else repetitions)
    click.echo(to_json(sizes, figures) if as_json else to_table(figures))
    slow = [figure.work for figure in figures if not figure.meets_bar]
    if check and slow:
        raise click.ClickException(f"too slow: {'; '.join(slow)}")


def to_table(figures: Sequence[Figure]) -> str:
    """A line a figure."""
    header = ("memory", "median µs", "min µs", "calls/s", "bar µs", "of bar", "met")
    return table(header, [_row(figure) for figure in figures])


def _row(figure: Figure) -> list[str]:
    bar = ["-", "-", "-"]
    if figure.ratio is not None:
        met = "yes" if figure.meets_bar else "NO"
        bar = [f"{figure.bar_us:g}", f"{figure.ratio:.2f}", met]
    speed = f"{figure.calls_per_s:.0f}"
    return [figure.work, f"{figure.median_us:.1f}", f"{figure.min_us:.1f}", speed, *bar]


def to_json(sizes: Sizes, figures: Sequence[Figure]) -> str:
    """One object."""
    found = [
        {
            **asdict(figure),
            "calls_per_s": figure.calls_per_s,
            "ratio": figure.ratio,
            "meets_bar": figure.meets_bar,
        }
        for figure in figures
    ]
    return json.dumps({"sizes": asdict(sizes), "figures": found})


if __name__ == "__main__":
    main()
