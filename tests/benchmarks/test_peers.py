from __future__ import annotations

import asyncio
import math
import re
from dataclasses import replace

import pytest

from benchmarks.peers.goodput import LOWEST_RATE, highest_rate, limits
from benchmarks.peers.interference import STREAMS, interfere, prompts, streams, summary
from benchmarks.peers.loads import LoadNameError, NamedLoad, parse_lengths
from benchmarks.peers.page import figures_of, goodput, write_page
from benchmarks.peers.ratios import Spread, ratio, spread
from benchmarks.peers.store import Key, Kind, Store
from kvrelay.deploy.load_generator.load_client import RunClock
from kvrelay.deploy.load_generator.load_report import Slo
from kvrelay.deploy.load_generator.trace import TraceRow
from kvrelay.deploy.load_generator.workload import Poisson, shrink
from tests.known import known

PROCESSOR = "a processor, AVX2"


def figures(tokens: float = 100.0, **more: object) -> dict[str, object]:
    latencies = {f"{name}_{p}_ms": 10.0 for name in ("ttft", "itl") for p in ("p50", "p90", "p99")}
    return {
        "output_tokens_per_s": tokens,
        **latencies,
        "failed": 0,
        "client_cpu_percent": 2.0,
        "others_cpu_percent": 5.0,
        "at": "2026-11-22 12:00",
        **more,
    }


class TestRatios:
    def test_each_round_is_compared_with_itself(self):
        ours = {0: figures(110), 1: figures(300), 2: figures(120)}
        theirs = {0: figures(100), 1: figures(200), 2: figures(100)}
        # The quotient of the medians would be 1.2; the median of the quotients is as well,
        # but the largest comes from the round in which both were quick.
        assert ratio(ours, theirs, "output_tokens_per_s") == Spread(1.2, 1.1, 1.5, 3)

    def test_a_round_of_one_side_alone_does_not_count(self):
        ours = {0: figures(50), 1: figures(300)}
        theirs = {1: figures(100), 2: figures(1)}
        assert ratio(ours, theirs, "output_tokens_per_s") == Spread(3.0, 3.0, 3.0, 1)

    def test_without_a_common_round_or_a_figure_there_is_none(self):
        assert ratio({0: figures()}, {1: figures()}, "output_tokens_per_s") is None
        assert ratio({0: figures(itl_p99_ms=None)}, {0: figures()}, "itl_p99_ms") is None
        assert ratio({0: figures()}, {0: figures(0.0)}, "output_tokens_per_s") is None

    def test_spread_is_over_the_rounds_that_have_the_figure(self):
        rounds = {0: figures(1), 1: figures(3), 2: figures(2), 3: figures(itl_p50_ms=None)}
        assert known(spread(rounds, "itl_p50_ms")).rounds == 3
        assert spread({}, "itl_p50_ms") is None


class TestGoodput:
    @pytest.mark.parametrize("capacity", [0.06, 0.3, 0.99, 1.0, 1.7, 23.0])
    @pytest.mark.parametrize("precision", [0.02, 0.1])
    async def test_finds_the_capacity_to_the_precision(self, capacity, precision):
        async def attains(rate):
            return rate <= capacity

        found = await highest_rate(attains, 1.0, precision)
        assert found <= capacity < found * (1 + precision) * 1.001

    async def test_what_attains_nothing_has_no_goodput(self):
        rates: list[float] = []

        async def never(rate: float) -> bool:
            rates.append(rate)
            return False

        assert await highest_rate(never, 1.0, 0.1) == 0
        assert min(rates) > LOWEST_RATE / 2

    async def test_the_same_answers_give_the_same_rates(self):
        asked: list[list[float]] = [[], []]
        for rates in asked:

            async def attains(rate: float, rates: list[float] = rates) -> bool:
                rates.append(rate)
                return rate < math.pi

            await highest_rate(attains, 1.0, 0.05)
        assert asked[0] == asked[1]
        assert len(set(asked[0])) == len(asked[0]) < 10

    def test_limits_follow_from_the_better_engines_medians(self):
        idle = [
            figures(ttft_p50_ms=80.0, itl_p50_ms=13.0),
            figures(ttft_p50_ms=100.0, itl_p50_ms=9.0),
        ]
        slo = limits(idle, 2)
        assert (slo.ttft_ms, slo.itl_ms) == (160, 18)
        assert limits(idle, 5) == Slo(400, 45)

    def test_arrivals_are_the_same_but_for_the_rate(self):
        slow, quick = (
            parse_lengths("256/128").workload(Poisson(rate), 20, number=3) for rate in (1.0, 4.0)
        )
        assert [job.due for job in slow.jobs] == pytest.approx(
            [4 * known(job.due) for job in quick.jobs]
        )


class TestInterference:
    def test_only_gaps_while_all_streams_run_count(self, record):
        early = record(token_times=(0.0, 1.0, 2.0, 3.0), token_counts=(1,) * 4)
        late = record(token_times=(1.5, 2.5, 4.5, 9.5), token_counts=(1,) * 4, index=1)
        found = summary([early, late], [])
        # From 1.5, when the second began, to 3.0, when the first ended.
        assert (known(found.itl_ms).count, known(found.itl_ms).max) == (3, pytest.approx(1000))

    def test_failures_of_both_kinds_are_counted(self, record):
        bad = record(status="UNAVAILABLE")
        found = summary([record(), bad], [record(first=0.5), bad, bad])
        assert (found.failed, found.prompts) == (3, 3)
        assert known(found.prompts_ttft_ms).p50 == pytest.approx(500)

    async def test_prompts_arrive_for_as_long_as_the_streams_run(self, record):
        clock = RunClock()
        sent: list[int] = []

        async def send(job):
            sent.append(job.index)
            if job.index < STREAMS:
                while len(sent) < STREAMS + 3:  # the streams wait for three prompts
                    await asyncio.sleep(0)
            return record(index=job.index)

        quick = replace(prompts(0), jobs=tuple(replace(j, due=0.0) for j in prompts(0).jobs[:3]))
        found = await interfere(streams(0), quick, send, clock)
        assert sorted(sent) == list(range(STREAMS + 3))
        assert (found.prompts, found.failed) == (3, 0)

    async def test_without_prompts_only_the_streams_are_sent(self, record):
        async def send(job):
            return record(index=job.index)

        found = await interfere(streams(0), None, send, RunClock())
        assert (found.prompts, known(found.itl_ms).count) == (0, STREAMS * 10)


class TestLoads:
    def test_a_load_has_lengths_and_clients(self):
        workload = NamedLoad.parse("256/128@32").workload(requests_per_client=4, number=0)
        assert (str(workload.load), len(workload.jobs)) == ("concurrency 32", 128)
        assert {(job.input_len, job.output_len) for job in workload.jobs} == {(256, 128)}

    @pytest.mark.parametrize("name", ["256/128", "256@8", "256/128@0", "256/128@x", "azure@4"])
    def test_another_name_is_refused(self, name):
        with pytest.raises(LoadNameError):
            NamedLoad.parse(name).workload(4, 0)

    def test_rounds_have_prompts_of_their_own(self):
        load = NamedLoad.parse("256/128@1")
        assert load.workload(4, 0).seed != load.workload(4, 1).seed

    def test_a_trace_is_scaled_and_cut(self, tmp_path):
        trace = tmp_path / "a.csv"
        trace.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.0,4000,100\n2023-11-16 18:15:47.0,400,1\n"
        )
        jobs = parse_lengths("azure", trace).jobs(2)
        assert [(job.input_len, job.output_len) for job in jobs] == [(1024, 50), (200, 1)]

    def test_nothing_shrinks_to_nothing(self):
        assert shrink([TraceRow(0.0, 3, 1)], 0.1) == [TraceRow(0.0, 1, 1)]


class TestStoreAndPage:
    def store(self, tmp_path) -> Store:
        store = Store(tmp_path / "runs.jsonl", PROCESSOR)
        for number, (ours, theirs) in enumerate([(150, 100), (90, 100), (120, 100)]):
            store.add(Key(Kind.LOAD, "adaptive", "256/128@8", number), figures(ours))
            store.add(Key(Kind.LOAD, "vllm", "256/128@8", number), figures(theirs))
        for system, rate in (("adaptive", 2.0), ("vllm", 1.0)):
            for probed, share in ((rate, 0.95), (rate / 2, 1.0), (2 * rate, 0.2)):
                for factor, found in ((2.0, share), (5.0, 1.0)):
                    store.add(
                        Key(Kind.PROBE, system, "256/128", 0, probed, factor),
                        figures(
                            slo_share=found, limit_ttft_ms=100 * factor, limit_itl_ms=15 * factor
                        ),
                    )
            store.add(Key(Kind.INTERFERENCE, system, "calm", 0), figures(prompts=0))
            arrived = figures(prompts=8, prompts_ttft_p50_ms=445.3)
            store.add(Key(Kind.INTERFERENCE, system, "prompts", 0), arrived)
        return store

    def test_what_was_measured_is_found_again(self, tmp_path):
        self.store(tmp_path)
        again = Store(tmp_path / "runs.jsonl", PROCESSOR)
        key = Key(Kind.LOAD, "adaptive", "256/128@8", 1)
        assert known(again.find(key))["output_tokens_per_s"] == 90
        assert again.find(Key(Kind.PROBE, "vllm", "256/128", 0, 1.0, 2.0)) is not None
        assert again.find(Key(Kind.LOAD, "adaptive", "256/128@8", 3)) is None
        assert sorted(again.rounds(Kind.LOAD, "vllm", "256/128@8")) == [0, 1, 2]

    def test_goodput_is_the_highest_rate_that_attained(self, tmp_path):
        store = self.store(tmp_path)
        assert goodput(store, "adaptive", "256/128", 2.0)[0]["rate"] == 2.0
        assert goodput(store, "adaptive", "256/128", 5.0)[0]["rate"] == 4.0

    def test_the_page_has_the_ratios_and_keeps_its_text(self, tmp_path):
        page = tmp_path / "bench-peers.md"
        other = "## Figures: another, AMX\n\nits figures\n"
        own = f"## Figures: {PROCESSOR}\n\n"
        page.write_text(f"# Title\n\nWhy it is fair.\n\n{own}old figures\n\n{other}")
        for _ in range(2):
            write_page(self.store(tmp_path), tmp_path)
        text = page.read_text()
        assert text.startswith(f"# Title\n\nWhy it is fair.\n\n{other}\n{own}Measured from")
        assert text.count("## Figures") == 2
        assert "old figures" not in text
        assert "1.20 (0.90 to 1.50)" in text  # tok/s over vLLM's
        assert re.search(
            r"200 / 30 .* adaptive +\| +2.00 \| +2.00 \| +1: 100, 2: 95, 4: 20 \|\n", text
        )
        assert re.search(
            r"500 / 75 .* vLLM aggregated +\| +2.00 \| +1.00 \| +0.5: 100, 1: 100,", text
        )
        assert re.search(r"vLLM aggregated .*\| +8 \| +445 \|\n", text)  # prompts beside streams
        assert (tmp_path / "bench-peers.svg").read_text().lstrip().startswith("<?xml")

    def test_a_new_folder_gets_the_page(self, tmp_path):
        write_page(self.store(tmp_path), tmp_path / "new")
        assert f"## Figures: {PROCESSOR}\n" in (tmp_path / "new" / "bench-peers.md").read_text()

    def test_processors_share_a_file_and_see_their_own(self, tmp_path):
        ours, theirs = self.store(tmp_path), Store(tmp_path / "runs.jsonl", "another, AMX")
        assert not list(theirs.of(Kind.LOAD))
        theirs.add(Key(Kind.LOAD, "vllm", "256/128@8", 0), figures(7))
        ours.clear()
        assert not list(Store(tmp_path / "runs.jsonl", PROCESSOR).of(Kind.LOAD))
        [(_, kept)] = Store(tmp_path / "runs.jsonl", "another, AMX").of(Kind.LOAD)
        assert kept["output_tokens_per_s"] == 7

    def test_an_empty_store_makes_no_tables(self, tmp_path):
        assert "|" not in "".join(figures_of(Store(tmp_path / "none.jsonl", PROCESSOR)))
