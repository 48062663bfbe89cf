from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import interference
from benchmarks.peers.__main__ import Comparison, OutOfTimeError, Plan
from benchmarks.peers.goodput import HIGHEST_RATE
from benchmarks.peers.loads import NamedLoad
from benchmarks.peers.store import Kind, Store
from benchmarks.peers.systems import (
    KV_GIBIBYTES,
    SYSTEMS,
    Command,
    Servers,
    Setup,
    StartError,
    free_port,
    started,
)
from kvrelay.deploy.load_generator.load_report import Slo
from tests.benchmarks.completions_server import READY_LINE

pytestmark = pytest.mark.slow  # it tests a benchmark, and `make test-all` runs it

PLAN = Plan(
    systems=("ours", "theirs"),
    rounds=2,
    requests_per_client=1,
    goodput_requests=10,
    limit_factor=2.0,
    first_rate=HIGHEST_RATE / 2,
    precision=1.0,
    trace=None,
    minutes=None,
)


@dataclass(frozen=True)
class Scripted:
    """A process of `tests.benchmarks.completions_server`, or of some other code."""

    name: str
    title: str = "a scripted server"
    code: str = ""
    instances: int = 1
    bears_stopping: bool = False

    def commands(self, setup: Setup) -> list[Command]:
        return [self._command(number) for number in range(self.instances)]

    def _command(self, number: int) -> Command:
        port = free_port()
        module = ("-m", "tests.benchmarks.completions_server", str(port))
        arguments = (sys.executable, *(("-c", self.code) if self.code else module))
        return Command(f"{self.name}-{number}", arguments, port, READY_LINE, {})


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    return Setup(tmp_path, tmp_path, tmp_path / "logs")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs.jsonl", "a processor")


@pytest.fixture
def comparison(setup, store) -> Iterator[Callable[[Plan], Comparison]]:
    with Servers(setup) as servers:
        yield lambda plan: Comparison(plan, setup, store, servers)


@pytest.fixture(autouse=True)
def _scripted(monkeypatch):
    systems = {name: Scripted(name, bears_stopping=True) for name in PLAN.systems}
    monkeypatch.setattr(command, "SYSTEMS", systems)


def test_a_system_is_ready_when_its_servers_answer_and_gone_afterwards(setup):
    before = set(psutil.Process().children(recursive=True))
    with started(Scripted("pair", instances=2), setup) as serving:
        assert serving.prefill_url not in (None, serving.base_url)
        assert len(set(psutil.Process().children(recursive=True)) - before) == 2
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_system_that_dies_is_told_with_the_end_of_its_log(setup):
    dying = Scripted("dying", code="raise SystemExit('no memory left')")
    with pytest.raises(StartError, match="no memory left"), started(dying, setup):
        pass


def test_what_a_server_leaves_behind_is_ended_with_it(setup, tmp_path):
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
    )
    with pytest.raises(StartError), started(Scripted("leaving", code=code), setup):
        pass
    assert _ends(int(child.read_text()))


def _becomes(process: psutil.Process, status: str) -> bool:
    """Whether the process has the status within ten seconds."""
    for _ in range(100):
        if process.status() == status:
            return True
        time.sleep(0.1)
    return False


def _ends(pid: int) -> bool:
    """Whether the process ends within ten seconds, reaped or not."""
    for _ in range(100):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def test_systems_take_turns_and_nothing_is_measured_twice(comparison, store, capsys):
    load = NamedLoad.parse("6/4@2")
    comparison(replace(PLAN, rounds=1)).throughput([load])
    comparison(PLAN).throughput([load])
    made = [(key.round, key.system) for key, _ in store.of(Kind.LOAD)]
    assert made == [(0, "ours"), (0, "theirs"), (1, "ours"), (1, "theirs")]
    assert capsys.readouterr().out.count("turn") == 4
    assert all(figures["failed"] == 0 for _, figures in store.of(Kind.LOAD))
    assert all(figures["output_tokens_per_s"] > 0 for _, figures in store.of(Kind.LOAD))


def test_a_system_that_bears_it_is_stopped_between_its_turns(setup):
    lasting = Scripted("lasting", bears_stopping=True)
    with Servers(setup) as servers:
        with servers.turn(lasting) as first:
            server = psutil.Process(first.processes[0].pid)
        assert _becomes(server, psutil.STATUS_STOPPED)
        with servers.turn(Scripted("other")):
            assert server.status() == psutil.STATUS_STOPPED
        with servers.turn(lasting) as second:
            assert second is first
            assert server.status() != psutil.STATUS_STOPPED
            with urlopen(f"{second.base_url}/v1/models") as answer:
                assert answer.status == 200
    assert _ends(server.pid)


def test_nothing_new_begins_when_the_time_is_over(comparison, store):
    with pytest.raises(OutOfTimeError):
        comparison(replace(PLAN, minutes=1e-9)).throughput([NamedLoad.parse("6/4@2")])
    assert not list(store.of(Kind.LOAD))


def test_a_search_for_goodput_goes_on_where_it_was_cut_off(comparison, store, monkeypatch):
    monkeypatch.setattr(command, "limits", lambda idle, factor: Slo(60_000.0, 60_000.0))
    plan = replace(PLAN, systems=("ours",), rounds=1)
    comparison(plan).goodput(["6/4"])
    probes = [key for key, _ in store.of(Kind.PROBE)]
    assert [key.rate for key in probes] == [HIGHEST_RATE / 2, HIGHEST_RATE]
    assert {figures["planned"] for _, figures in store.of(Kind.PROBE)} == {10}
    comparison(plan).goodput(["6/4"])
    assert [key for key, _ in store.of(Kind.PROBE)] == probes


def test_interference_is_measured_with_and_without_prompts(comparison, store, monkeypatch):
    monkeypatch.setattr(interference, "STREAM_LENGTHS", "8/64")
    monkeypatch.setattr(interference, "PROMPTS_PER_SECOND", 20.0)
    plan = replace(PLAN, systems=("ours",), rounds=1)
    comparison(plan).interference()
    found = {key.load: figures for key, figures in store.of(Kind.INTERFERENCE)}
    assert set(found) == {"calm", "prompts"}
    assert found["calm"]["prompts"] == 0
    assert found["prompts"]["prompts"] >= 1
    assert found["prompts"]["failed"] == found["calm"]["failed"] == 0


def test_on_a_gpu_all_systems_get_the_device_and_the_same_memory(setup: Setup) -> None:
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (setup.model / "config.json").write_text(json.dumps({**sizes, "num_hidden_layers": 30}))
    on_gpu = replace(setup, device="cuda", sglang=Path("/sglang"))
    [ours] = SYSTEMS["adaptive"].commands(on_gpu)
    assert {"cuda", f"{KV_GIBIBYTES}GiB"} <= set(ours.arguments)
    [theirs] = SYSTEMS["vllm"].commands(on_gpu)
    assert str(KV_GIBIBYTES << 30) in theirs.arguments
    assert not any("CPU" in name for name in theirs.environment)
    [sglang] = SYSTEMS["sglang"].commands(on_gpu)
    assert sglang.arguments[0] == "/sglang/bin/python"
    assert str((KV_GIBIBYTES << 30) // (30 * 2 * 3 * 64 * 2)) in sglang.arguments


def test_on_a_cpu_vllm_has_all_cores_and_sglang_is_refused(setup: Setup) -> None:
    [theirs] = SYSTEMS["vllm"].commands(setup)
    assert theirs.environment["VLLM_CPU_KVCACHE_SPACE"] == str(KV_GIBIBYTES)
    assert not any("kv-cache-memory" in argument for argument in theirs.arguments)
    with pytest.raises(StartError, match="--device cuda"):
        SYSTEMS["sglang"].commands(setup)
