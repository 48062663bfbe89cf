"""Host memory and storage below the device: what they save on a trace, and how fast bytes move.

python -m benchmarks.tiers mooncake_conversation_trace.jsonl.gz

The replay: one aggregated worker gets the trace's requests, with device memory alone, with a host
tier below it, and with storage below that. Scheduler, memory, prefix index and tiers are the real
ones; forwards (10 ms and 0.2 ms a token), copies (1 MiB a page, ``--copy-rate``) and storage
(``--storage-rate``) take the time of a virtual clock. Lengths are an eighth of the trace's, as in
`benchmarks.prefix_placement`. All see the same requests at the same moments.

The copies: scattered pages between two real pools, by the code that the copy thread runs, beside
a plain copy of as many bytes that lie together. In turn; medians of gigabytes a second.

The files: pages by the store of files and NIXL, written until they are safe and read again after
the system has forgotten them, beside one plain write and read of as many bytes in one file.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.prefix_placement import MOST_TOKENS, PAGE_SIZE, scaled
from kvrelay.deploy.load_generator.table import table
from kvrelay.deploy.load_generator.trace import TraceRow, read_trace
from kvrelay.kv_transfer.nixl_files import NixlFiles
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.host.tier_copies import PageMoves, copy_moves
from kvrelay.mem_cache.host.tier_speed import TierSpeed
from kvrelay.mem_cache.pool import KVPool
from kvrelay.mem_cache.storage.storage_files import FileStore
from kvrelay.mem_cache.storage.storage_format import StorageFormat
from kvrelay.mem_cache.storage.storage_orders import Fetch, StorageOrder, Store
from kvrelay.mem_cache.storage.storage_pages import NOTHING_BEFORE, StoragePage, StoreOperation
from tests.engine.simulation.clockwork import Clockwork
from tests.engine.simulation.placed import ttfts
from tests.engine.simulation.storage import MemoryStore
from tests.engine.simulation.worker import PAGE_BYTES, SimWorker, count

SMOLLM2 = KVGeometry(30, 3, 64, torch.bfloat16, PAGE_SIZE)
"""360 KiB a page."""
ROUNDS = 21


class TieredClockwork(Clockwork):
    """An aggregated worker with a host tier, whose copies take time.

    Args:
        pages: of the device.
        host_pages: 0: no host tier.
        bytes_per_second: of copies.
        storage_rate: bytes a second of storage, which holds all that goes there; 0: there is none.
    """

    def __init__(
        self, pages: int, host_pages: int, bytes_per_second: float, storage_rate: float
    ) -> None:
        super().__init__(
            0,
            PAGE_SIZE,
            pages,
            64,
            512,
            aggregated=True,
            workers=1,
            audit_pages=False,
            most_tokens=MOST_TOKENS,
            host_pages=host_pages,
            make_store=_make_store if storage_rate else None,
        )
        self._storage_rate = storage_rate
        self._bytes_per_second = bytes_per_second
        self.worker = self.workers[0]
        self.worker.kv_cache.clock = self.now
        if self.worker.tier is not None:
            self.worker.tier.loads.speed = TierSpeed(bytes_per_second)
            if self.worker.tier.storage is not None:
                self.worker.tier.storage.speed = TierSpeed(storage_rate)

    def storage_seconds(self, order: StorageOrder) -> float:
        """See `Clockwork`."""
        if not isinstance(order, Fetch | Store):
            return 0.0
        return len(order.pages) * PAGE_BYTES / self._storage_rate

    def copy_seconds(self, worker: SimWorker, moves: PageMoves) -> float:
        """See `Clockwork`."""
        return moves.num_pages * PAGE_BYTES / self._bytes_per_second


def _make_store(worker: SimWorker) -> MemoryStore:
    return MemoryStore({}, lambda: worker.counting.host_kv)


@dataclass(frozen=True)
class Replay:
    """The trace with one size of the host tier, with storage or without."""

    device_pages: int
    host_pages: int
    has_storage: bool
    hits: float
    """Share of the prompts' tokens that were not computed."""
    computed_tokens: int
    loaded_tokens: int
    """From the host."""
    stored_tokens: int
    """Read from storage."""
    written_pages: int
    dropped_pages: int
    ttft_p50_seconds: float
    ttft_p90_seconds: float
    ttft_mean_seconds: float


def replay(
    rows: Sequence[TraceRow],
    speed: float,
    pages: int,
    host_pages: int,
    bytes_per_second: float,
    storage_rate: float,
) -> Replay:
    """Play the rows, `speed` times as fast, until all requests have ended."""
    simulation = TieredClockwork(pages, host_pages, bytes_per_second, storage_rate)
    for row in rows:
        simulation.run_until((row.at - rows[0].at) / speed)
        prompt, output = scaled(row)
        simulation.submit(prompt, output)
    simulation.run_until(simulation.clock + 36_000)
    simulation.assert_at_baseline()
    submitted = simulation.submitted
    waits = sorted(ttfts(simulation))
    tier = simulation.worker.tier
    storage = tier.storage if tier else None
    return Replay(
        pages,
        host_pages,
        storage is not None,
        sum(request.cached_tokens for request in submitted)
        / sum(len(request.prompt) for request in submitted),
        int(count(simulation.worker, "computed_tokens")),
        tier.counts.loaded_pages * PAGE_SIZE if tier else 0,
        storage.counts.loaded_pages * PAGE_SIZE if storage else 0,
        tier.counts.written_pages if tier else 0,
        tier.counts.dropped_pages if tier else 0,
        statistics.median(waits),
        waits[int(0.9 * len(waits))],
        statistics.mean(waits),
    )


@dataclass(frozen=True)
class CopyRate:
    """What was copied, and how fast."""

    what: str
    pages: int
    gigabytes_per_second: float


def measure_copies(total_pages: int, pages: int) -> Iterator[CopyRate]:
    """Copies of so many scattered pages each way, and a plain copy of as many bytes."""
    device, host = (KVPool(SMOLLM2, total_pages, torch.device("cpu")) for _ in range(2))
    layers = KVPool(
        KVGeometry(30, 3, 64, torch.bfloat16, PAGE_SIZE, PageOrder.LAYER_FIRST),
        total_pages,
        torch.device("cpu"),
    )
    # Each time other pages, so that none are in the processor's caches.
    order = random.Random(1).sample(range(total_pages), total_pages)
    starts = cycle(range(0, total_pages - pages + 1, pages))
    source, target = (np.ones(total_pages * SMOLLM2.page_bytes, np.uint8) for _ in range(2))

    def move(pool: KVPool, *, to_host: bool) -> None:
        first = next(starts)
        here = np.array(order[first : first + pages], np.int32)
        there = np.array(order[::-1][first : first + pages], np.int32)
        copy_moves(PageMoves(1, to_host, (here,), (there,)), [pool], [host])

    def copy_plainly() -> None:
        first = next(starts) * SMOLLM2.page_bytes
        part = slice(first, first + pages * SMOLLM2.page_bytes)
        np.copyto(target[part], source[part])

    ways: dict[str, Callable[[], None]] = {
        "plain copy": copy_plainly,
        "to the host": lambda: move(device, to_host=True),
        "from the host": lambda: move(device, to_host=False),
        "to the host, layer_first": lambda: move(layers, to_host=True),
    }
    seconds: dict[str, list[float]] = {what: [] for what in ways}
    for number in range(ROUNDS + 1):
        for what, copy in ways.items():
            begun = time.perf_counter()
            copy()
            if number:  # the first one only warms up
                seconds[what].append(time.perf_counter() - begun)
    for what, taken in seconds.items():
        gigabytes = pages * SMOLLM2.page_bytes / 1e9
        yield CopyRate(what, pages, gigabytes / statistics.median(taken))


def measure_files(folder: Path, pages: int) -> Iterator[CopyRate]:
    """So many pages to files and back, by the store and by plain calls."""
    pool = KVPool(SMOLLM2, pages, torch.device("cpu"))
    memory = pool.data.view(torch.uint8).view(pages, -1).numpy()
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, np.uint8)
    layout = StorageFormat(bytes(32), 4 * PAGE_SIZE, SMOLLM2.page_bytes)
    size = ROUNDS * pages * layout.slot_bytes
    store = FileStore(folder, layout, size, PAGE_SIZE, [memory], NixlFiles())
    whole = memory.data.cast("B")
    plain = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(plain, 0, memory.nbytes)
    seconds: dict[str, list[float]] = {}

    def time_of(what: str, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        work()
        seconds.setdefault(what, []).append(time.perf_counter() - begun)

    for number in range(ROUNDS):
        batch = _batch(number, pages)
        time_of("to files", lambda batch=batch: _finish(store.put(batch)))  # type: ignore[misc]
        time_of("plain write", lambda: _write(plain, whole))
        for path in (*folder.glob("*/segment-*"), folder / "plain"):
            _forget_cached(path)
        time_of("from files", lambda batch=batch: _finish(store.get(batch)))  # type: ignore[misc]
        time_of("plain read", lambda: os.preadv(plain, [whole], 0))
        time_of("from files, cached", lambda batch=batch: _finish(store.get(batch)))  # type: ignore[misc]
        time_of("plain read, cached", lambda: os.preadv(plain, [whole], 0))
    os.close(plain)
    store.close()
    for what, taken in seconds.items():
        yield CopyRate(what, pages, memory.nbytes / 1e9 / statistics.median(taken))


def _write(file: int, content: memoryview) -> None:
    os.pwrite(file, content, 0)
    os.fdatasync(file)


def _batch(number: int, pages: int) -> list[StoragePage]:
    """Pages of which the store has none yet."""
    keys = [(number * pages + one).to_bytes(32, "big") for one in range(pages)]
    return [StoragePage(key, NOTHING_BEFORE, bytes(64), slot) for slot, key in enumerate(keys)]


def _finish(operation: StoreOperation) -> None:
    while (valid := operation.poll()) is None:
        time.sleep(50e-6)
    assert all(valid), "a page did not move"


def _forget_cached(path: Path) -> None:
    """Let the system forget what it has of a file in memory."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--requests", default=500, show_default=True, help="Rows of the trace.")
@click.option("--speed", default=0.8, show_default=True, help="The trace is played so much faster.")
@click.option("--pages", default=1024, show_default=True, help="Of 16 tokens, of the device.")
@click.option(
    "--host-pages",
    "host_sizes",
    type=int,
    multiple=True,
    default=(0, 4096, 16_384),
    show_default=True,
    help="Of the host.",
)
@click.option("--copy-rate", default=3.0, show_default=True, help="Of the replay, in GB/s.")
@click.option("--storage-rate", default=1.0, show_default=True, help="Of the replay, in GB/s.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where files are written for their rates; the system's temporary folder otherwise.",
)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the figures here.")
def main(
    trace: Path,
    requests: int,
    speed: float,
    pages: int,
    host_sizes: tuple[int, ...],
    copy_rate: float,
    storage_rate: float,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Hit rates, computed tokens and times to first token; and raw copy rates."""
    copies = [rate for number in (11, 45) for rate in measure_copies(1024, number)]
    with tempfile.TemporaryDirectory(dir=folder) as files:
        copies += measure_files(Path(files), 22)
    rows = read_trace(trace, requests)
    replays = [
        replay(rows, speed, pages, size, copy_rate * 1e9, rate)
        for size in host_sizes
        for rate in ((0.0, storage_rate * 1e9) if size else (0.0,))
    ]
    click.echo(
        table(
            ["copy", "pages", "GB/s"],
            [[one.what, str(one.pages), f"{one.gigabytes_per_second:.2f}"] for one in copies],
        )
    )
    head = ["host pages", "storage", "hits", "computed", "loaded", "stored", "written", "dropped"]
    click.echo(
        table(
            [*head, "TTFT p50", "p90", "mean"],
            [
                [
                    str(one.host_pages),
                    "yes" if one.has_storage else "no",
                    f"{one.hits:.1%}",
                    str(one.computed_tokens),
                    str(one.loaded_tokens),
                    str(one.stored_tokens),
                    str(one.written_pages),
                    str(one.dropped_pages),
                    f"{one.ttft_p50_seconds:.2f}",
                    f"{one.ttft_p90_seconds:.2f}",
                    f"{one.ttft_mean_seconds:.2f}",
                ]
                for one in replays
            ],
        )
    )
    if out is not None:
        figures = {"copies": [*map(asdict, copies)], "replays": [*map(asdict, replays)]}
        out.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
