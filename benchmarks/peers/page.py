"""The page and the picture of a comparison, from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.goodput import ATTAINED_SHARE
from benchmarks.peers.ratios import Spread, ratio, spread
from benchmarks.peers.store import Figures, Kind, Store
from benchmarks.peers.systems import SYSTEMS
from kvrelay.deploy.load_generator.plot import PlotError, plain_minor_ticks, require_matplotlib
from kvrelay.deploy.load_generator.table import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "# kvrelay beside vLLM"
REFERENCES = ("vllm", "vllm-1p1d", "sglang")
_FIGURES = (
    ("output tok/s", "output_tokens_per_s"),
    ("TTFT p50, ms", "ttft_p50_ms"),
    ("ITL p50, ms", "itl_p50_ms"),
    ("ITL p99, ms", "itl_p99_ms"),
)
_FIGURES_OF = "\n## Figures: "
"""What a processor's section begins with, before its name."""
_PERCENTILES = ("p50", "p99")
_INTERFERENCE = (("alone", "calm"), ("while prompts arrive", "prompts"))
_ARRIVED = (("these prompts", "prompts", 0), ("their TTFT p50", "prompts_ttft_p50_ms", None))


def write_page(store: Store, folder: Path) -> None:
    """Write this processor's section of ``bench-peers.md``, and ``bench-peers.svg`` of it.

    The text above the figures and the sections of other processors are kept. The folder is made.

    Raises:
        PlotError: the picture cannot be drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "bench-peers.md"
    text = page.read_text(encoding="utf-8") if page.exists() else f"{TITLE}\n"
    above, *sections = text.split(_FIGURES_OF)
    of_others = [one for one in sections if one.partition("\n")[0] != store.processor]
    own = "\n".join((store.processor, "", *figures_of(store)))
    sections = [one.rstrip("\n") + "\n" for one in (above, *of_others, own)]
    page.write_text(_FIGURES_OF.join(sections), encoding="utf-8")
    _draw(store, folder / "bench-peers.svg")


def figures_of(store: Store) -> list[str]:
    """The lines of all tables."""
    lines = [_conditions(store), ""]
    for title, make in (
        ("Throughput and latency", _throughput),
        ("Ratios", _ratios),
        ("Goodput", _goodput),
        ("Interference", _interference),
    ):
        rows = list(make(store))
        if len(rows) > 1:
            lines += [f"### {title}", "", _EXPLAINED[title], "", table(rows[0], rows[1:]), ""]
    return lines


_EXPLAINED = {
    "Throughput and latency": (
        "Prompt and output tokens of each request @ clients in a closed loop; the median of the"
        " rounds, and in brackets the least and the largest."
    ),
    "Ratios": (
        "kvrelay's figure over another engine's of the same round: the median, and in brackets the"
        " least and the largest. Above 1 is better for tok/s, below 1 for latencies."
    ),
    "Goodput": (
        f"The highest rate of Poisson arrivals at which {ATTAINED_SHARE:.0%} of all requests meet"
        " both limits, on the time to the first token and on the request's mean inter-token"
        " latency: a multiple of the better engine's medians while it serves one request at a time."
    ),
    "Interference": (
        "The inter-token latencies (ms) of eight steady streams, alone and while prompts of 1,024"
        " tokens arrive, one in two seconds (Poisson), and how many arrived before the streams"
        " ended: where streams are held up, more do."
    ),
}


def _conditions(store: Store) -> str:
    """When it was measured, and what else the machine and the client did."""
    entries = [figures for kind in Kind for _, figures in store.of(kind)]
    if not entries:
        return "Nothing has been measured yet."
    times = sorted(str(figures["at"]) for figures in entries)
    others = Spread.of(figures["others_cpu_percent"] for figures in entries)
    client = Spread.of(figures["client_cpu_percent"] for figures in entries)
    failed = sum(figures["failed"] for figures in entries)
    assert others is not None
    assert client is not None
    return (
        f"Measured from {times[0]} to {times[-1]} UTC. Before a system started, all cores were busy"
        f" with other work for {others.median:.0f}% (at most {others.largest:.0f}%). The client"
        f" took {client.median:.1f}% of one core (at most {client.largest:.1f}%)."
        f" Requests that failed: {failed}."
    )


def _throughput(store: Store) -> Iterator[Sequence[str]]:
    yield ("load", "system", *(title for title, _ in _FIGURES), "rounds")
    for load, system in _measured(store, Kind.LOAD):
        rounds = store.rounds(Kind.LOAD, system, load)
        spreads = [spread(rounds, figure) for _, figure in _FIGURES]
        yield (load, SYSTEMS[system].title, *map(_absolute, spreads), str(len(rounds)))


def _ratios(store: Store) -> Iterator[Sequence[str]]:
    yield ("load", "system", "over", *(title.partition(",")[0] for title, _ in _FIGURES))
    for load, system in _measured(store, Kind.LOAD):
        for reference in REFERENCES:
            if system in REFERENCES:
                continue
            ours = store.rounds(Kind.LOAD, system, load)
            theirs = store.rounds(Kind.LOAD, reference, load)
            found = [ratio(ours, theirs, figure) for _, figure in _FIGURES]
            if any(found):
                titles = (SYSTEMS[system].title, SYSTEMS[reference].title)
                yield (load, *titles, *(_relative(one) for one in found))


def goodput(
    store: Store, system: str, lengths: str, limit_factor: float | None
) -> dict[int, Figures]:
    """By round, the highest rate among the probes that attained, and their limits."""
    best: dict[int, Figures] = {}
    for key, figures in store.of(Kind.PROBE):
        if (key.system, key.load, key.limit_factor) == (system, lengths, limit_factor):
            found = best.setdefault(key.round, {**figures, "rate": 0.0})
            if figures["slo_share"] >= ATTAINED_SHARE:
                found["rate"] = max(found["rate"], key.rate)
    return best


def _goodput(store: Store) -> Iterator[Sequence[str]]:
    header = ("requests", "limits, ms", "system", "goodput, req/s", "over vLLM's")
    yield (*header, "rate: % of requests within the limits")
    factors = dict.fromkeys(key.limit_factor for key, _ in store.of(Kind.PROBE))
    for factor, (lengths, system) in product(factors, _measured(store, Kind.PROBE)):
        best = goodput(store, system, lengths, factor)
        if not best:
            continue
        first = next(iter(best.values()))
        over = ratio(best, goodput(store, "vllm", lengths, factor), "rate")
        limits = f"{first['limit_ttft_ms']:.0f} / {first['limit_itl_ms']:.0f}"
        rate = _absolute(spread(best, "rate"), 2)
        shares = _shares(store, system, lengths, factor)
        yield (lengths, limits, SYSTEMS[system].title, rate, _relative(over), shares)


def _shares(store: Store, system: str, lengths: str, limit_factor: float | None) -> str:
    """Of the first round, for each rate that was tried."""
    tried = {
        key.rate: figures["slo_share"]
        for key, figures in store.of(Kind.PROBE)
        if (key.system, key.load, key.round) == (system, lengths, 0)
        and key.limit_factor == limit_factor
    }
    return ", ".join(f"{rate:.3g}: {100 * share:.0f}" for rate, share in sorted(tried.items()))


def _interference(store: Store) -> Iterator[Sequence[str]]:
    titles = (f"ITL {p}, {title}" for title, _ in _INTERFERENCE for p in _PERCENTILES)
    yield ("system", *titles, *(title for title, *_ in _ARRIVED))
    measured = {key.system for key, _ in store.of(Kind.INTERFERENCE)}
    for system in (name for name in SYSTEMS if name in measured):
        cells = [
            _absolute(spread(store.rounds(Kind.INTERFERENCE, system, load), f"itl_{p}_ms"))
            for _, load in _INTERFERENCE
            for p in _PERCENTILES
        ]
        arrived = store.rounds(Kind.INTERFERENCE, system, _INTERFERENCE[1][1])
        cells += [_absolute(spread(arrived, figure), digits) for _, figure, digits in _ARRIVED]
        yield (SYSTEMS[system].title, *cells)


def _measured(store: Store, kind: Kind) -> Iterator[tuple[str, str]]:
    """The pairs of load and system, loads as they were first measured, systems as listed."""
    pairs = {(key.load, key.system) for key, _ in store.of(kind)}
    for load in dict.fromkeys(key.load for key, _ in store.of(kind)):
        yield from ((load, system) for system in SYSTEMS if (load, system) in pairs)


def _absolute(found: Spread | None, digits: int | None = None) -> str:
    return _cell(found, lambda value: _short(value) if digits is None else f"{value:.{digits}f}")


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _relative(found: Spread | None) -> str:
    return _cell(found, lambda value: f"{value:.2f}")


def _cell(found: Spread | None, write: Callable[[float], str]) -> str:
    if found is None:
        return "-"
    if found.rounds == 1:
        return write(found.median)
    return f"{write(found.median)} ({write(found.least)} to {write(found.largest)})"


def _draw(store: Store, path: Path) -> None:
    """Throughput and ITL p99 of each system under each load, with their spreads."""
    figure = require_matplotlib()(figsize=(11, 8), layout="constrained")
    above, below = figure.subplots(2, 1)
    _bars(above, store, "output_tokens_per_s", "output tokens a second")
    _bars(below, store, "itl_p99_ms", "ITL p99, ms")
    below.set_yscale("log")
    below.yaxis.set_major_formatter("{x:g}")
    below.yaxis.set_minor_formatter(plain_minor_ticks())
    if above.containers:
        above.legend(fontsize="small")
    try:
        figure.savefig(path, metadata={"Date": None})
    except (OSError, ValueError) as error:
        raise PlotError(f"{path}: {error}") from error


def _bars(axis: Axes, store: Store, figure: str, title: str) -> None:
    measured = list(_measured(store, Kind.LOAD))
    loads = list(dict.fromkeys(load for load, _ in measured))
    systems = [name for name in SYSTEMS if any(name == system for _, system in measured)]
    width = 0.8 / max(1, len(systems))
    for at, system in enumerate(systems):
        found = [spread(store.rounds(Kind.LOAD, system, load), figure) for load in loads]
        known = [(place, one) for place, one in enumerate(found) if one is not None]
        axis.bar(
            [place + (at - (len(systems) - 1) / 2) * width for place, _ in known],
            [one.median for _, one in known],
            width,
            yerr=(
                [one.median - one.least for _, one in known],
                [one.largest - one.median for _, one in known],
            ),
            label=SYSTEMS[system].title,
        )
    axis.set_xticks(range(len(loads)), loads)
    axis.set(ylabel=title)
    axis.grid(axis="y", alpha=0.3)
