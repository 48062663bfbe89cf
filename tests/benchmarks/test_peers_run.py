from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers.__main__ import Comparison, OutOfTimeError, Plan
from benchmarks.peers.loads import NamedLoad
from benchmarks.peers.store import Kind, Store
from benchmarks.peers.systems import Command, Setup, StartError, free_port, started
from tests.benchmarks.completions_server import READY_LINE

PLAN = Plan(
    systems=("ours", "theirs"),
    rounds=2,
    requests_per_client=1,
    goodput_requests=10,
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
    return Store(tmp_path / "runs.jsonl")


@pytest.fixture(autouse=True)
def _scripted(monkeypatch):
    systems = {name: Scripted(name) for name in PLAN.systems}
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


def test_systems_take_turns_round_by_round_and_nothing_is_measured_twice(setup, store, monkeypatch):
    begun: list[str] = []

    def noted(system: Scripted, setup: Setup):
        begun.append(system.name)
        return started(system, setup)

    monkeypatch.setattr(command, "started", noted)
    load = NamedLoad.parse("6/4@2")
    Comparison(replace(PLAN, rounds=1), setup, store).throughput([load])
    assert begun == ["ours", "theirs"]
    Comparison(PLAN, setup, store).throughput([load])
    assert begun == ["ours", "theirs"] * 2
    made = [(key.round, key.system) for key, _ in store.of(Kind.LOAD)]
    assert made == [(0, "ours"), (0, "theirs"), (1, "ours"), (1, "theirs")]
    assert all(figures["failed"] == 0 for _, figures in store.of(Kind.LOAD))
    assert all(figures["output_tokens_per_s"] > 0 for _, figures in store.of(Kind.LOAD))


def test_nothing_new_begins_when_the_time_is_over(setup, store):
    with pytest.raises(OutOfTimeError):
        Comparison(replace(PLAN, minutes=1e-9), setup, store).throughput([NamedLoad.parse("6/4@2")])
    assert not list(store.of(Kind.LOAD))


def test_a_search_for_goodput_goes_on_where_it_was_cut_off(setup, store, monkeypatch):
    monkeypatch.setattr(command, "FIRST_RATE", 50.0)
    plan = replace(PLAN, systems=("ours",), rounds=1)
    Comparison(plan, setup, store).goodput(["6/4"])
    probes = [key for key, _ in store.of(Kind.PROBE)]
    assert {key.system for key in probes} == {"ours"}
    assert {figures["planned"] for _, figures in store.of(Kind.PROBE)} == {10}
    Comparison(plan, setup, store).goodput(["6/4"])
    assert [key for key, _ in store.of(Kind.PROBE)] == probes


def test_interference_is_measured_with_and_without_prompts(setup, store):
    plan = replace(PLAN, systems=("ours",), rounds=1)
    Comparison(plan, setup, store).interference()
    found = {key.load: figures for key, figures in store.of(Kind.INTERFERENCE)}
    assert set(found) == {"calm", "prompts"}
    assert found["calm"]["prompts"] == 0
    assert found["prompts"]["prompts"] >= 1
    assert found["prompts"]["failed"] == found["calm"]["failed"] == 0
