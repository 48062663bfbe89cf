"""What `kvrelay doctor` says of nodes and pairs of them; tests/hosts has it on real ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from kvrelay.deploy.examination.examine import Seat, Wanted, examine, rounds
from kvrelay.deploy.examination.examiner import Reading, lanes_of
from kvrelay.deploy.examination.facts import (
    NodeFacts,
    digest_of_code,
    facts_of_this_node,
    huge_pages_bytes,
    rdma_ports,
    transparent_huge_pages,
    with_processor,
)
from kvrelay.deploy.examination.findings import (
    Finding,
    Level,
    Node,
    NodePair,
    finding_of_model,
    findings_of,
)
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.wire.version import VERSION
from tests.known import known

RayError = ray.exceptions.RayError
OK, WARN, FAIL = Level.OK, Level.WARN, Level.FAIL
HERE = NodeFacts(
    name="here",
    version=VERSION,
    code="abc",
    packages={"python": "3.11.2", "nixl": "1.5.1"},
    cores=8,
    numa_nodes=1,
    memlock_bytes=8 << 20,
    open_files=65536,
    transparent_huge_pages="madvise",
    shared_memory_bytes=8 << 30,
    shared_memory_free_bytes=7 << 30,
)
NODE = Node("a1 (10.0.0.2)", facts=HERE)
RDMA = {"rdma_ports": ("mlx5_0:1",)}
WAYS = {f"1 threads, {n} x 576": "onednn" if n == 80 else "own" for n in (960, 80, 576)}


def found(*nodes: Node, pairs: Sequence[NodePair] = ()) -> list[Finding]:
    return findings_of(nodes, pairs, HERE, 2 << 20)


def node(**facts: object) -> Node:
    return replace(NODE, facts=replace(HERE, **facts))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", range(1, 10))
def test_every_pair_meets_once_and_no_node_twice_in_a_round(number: int):
    played = list(rounds(number))
    for one in played:
        players = [player for pair in one for player in pair]
        assert len(players) == len(set(players))
    assert sorted(itertools.chain(*played)) == list(itertools.combinations(range(number), 2))
    assert len(played) <= number


def test_nothing_is_wrong_with_a_good_node():
    findings = found(NODE)
    assert {finding.level for finding in findings} == {OK}
    assert not any(finding.advice for finding in findings)
    assert len({finding.check for finding in findings}) == len(findings)


@pytest.mark.parametrize(
    ("one", "check", "level", "text"),
    [
        (node(version="0.0.9"), "version", FAIL, "kvrelay 0.0.9, here "),
        (node(code="def"), "version", WARN, "with other files than here"),
        (node(packages={"python": "3.11.2"}), "packages", WARN, "nixl missing (here 1.5.1)"),
        (replace(NODE, nixl_error="no UCX"), "nixl", FAIL, "NIXL cannot be used: no UCX"),
        (node(**RDMA, rdma_ports_down=("mlx5_0:1",)), "nixl", WARN, "mlx5_0:1 is down"),
        (node(**RDMA), "memlock", FAIL, "at most 8MiB"),
        (node(**RDMA, memlock_bytes=None), "memlock", OK, "unlimited"),
        (node(**RDMA, transparent_huge_pages="never"), "huge pages", WARN, "transparent: never"),
        (node(transparent_huge_pages="never"), "huge pages", OK, "transparent: never"),
        (node(shared_memory_bytes=64 << 20), "shared memory", WARN, "free of 0.1 GiB"),
        (node(shared_memory_free_bytes=1 << 20), "shared memory", FAIL, "0.0 GiB free"),
        (node(open_files=1024), "open files", WARN, "at most 1024"),
        (node(numa_nodes=2), "cores", OK, "on 2 NUMA nodes; a worker keeps to one"),
        (node(processor="X, AMX"), "processor", OK, "X, AMX; products timed: none yet"),
        (node(), "processor", OK, "not known; products timed: none yet"),
        (node(product_ways=WAYS), "processor", OK, "timed: 2 by own, 1 by onednn"),
        (node(model=""), "model", FAIL, "is not there"),
        (node(model="12"), "model", OK, "digest 12"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(one: Node, check: str, level: Level, text: str):
    [finding] = [finding for finding in found(one) if finding.check == check]
    assert (finding.level, finding.where) == (level, NODE.name)
    assert text in finding.text
    assert bool(finding.advice) is (level is not OK)
    assert all(other.level is OK for other in found(one) if other.check not in (check, "memlock"))


@pytest.mark.parametrize(
    ("ahead", "error", "level"),
    [(0.5, 0.01, OK), (-1.5, 0.01, WARN), (1.5, 0.6, OK), (61.0, 0.5, FAIL), (-61.0, 0.5, FAIL)],
)
def test_a_clock_is_judged_by_what_is_sure(ahead: float, error: float, level: Level):
    one = replace(NODE, clock_seconds=ahead, clock_error_seconds=error)
    assert [finding.level for finding in found(one) if finding.check == "clock"] == [level]


def test_a_node_without_a_process_says_only_that():
    [finding] = found(replace(NODE, error="no process of kvrelay runs there: gone"))
    assert (finding.level, finding.check) == (FAIL, "process")
    assert "install the same kvrelay on every node" in finding.advice


def test_the_node_with_another_model_is_named():
    nodes = [replace(node(model=digest), name=digest) for digest in ("x", "y", "x")]
    [finding] = [finding for finding in found(*nodes) if finding.level is FAIL]
    assert (finding.where, finding.check) == ("y", "model")


def test_pairs_are_judged_by_the_others():
    pairs = [NodePair("a", "b", 2e9, "UCX", ("tcp/eth0",)), NodePair("b", "a", 3e9, "UCX")]
    pairs += [
        NodePair("a", "c", 0.9e9, "UCX"),
        NodePair("c", "a", refusal="c was not read in 10 s"),
    ]
    said = found(pairs=pairs)
    assert [finding.level for finding in said] == [OK, OK, WARN, FAIL]
    assert said[0].where == "a reads from b"
    assert said[0].text == "2 GB/s in pieces of 2MiB by UCX (tcp/eth0)"
    assert said[3].text == "c was not read in 10 s"
    assert "--advertise" in said[3].advice


def test_ucxs_lanes_between_processes_are_found():
    log = """
    [vm:1] ucp_worker.c:1 UCX  INFO  a self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)
    [vm:1] ucp_worker.c:1 UCX  INFO  a inter-node cfg#1 rma_am(tcp/eth0)  am(tcp/eth0)
    [vm:1] ucp_worker.c:1 UCX  INFO  a inter-node cfg#2 rma(rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1) am(x)
    [vm:1] ucp_worker.c:1 UCX  INFO  a intra-node cfg#3 rma_am(tcp/lo) am(tcp/lo cma/memory)
    """
    rdma = ("rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1")
    assert lanes_of(log) == ("tcp/eth0", *rdma, "tcp/lo", "cma/memory")
    assert lanes_of("") == ()


def test_a_system_is_read_from_its_files(tmp_path: Path):
    assert (huge_pages_bytes(tmp_path), transparent_huge_pages(tmp_path)) == (0, "")
    assert rdma_ports(tmp_path) == ((), ())
    files = {
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "3",
        "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "1",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert huge_pages_bytes(tmp_path) == (6 << 20) + (1 << 30)
    assert transparent_huge_pages(tmp_path) == "madvise"
    assert rdma_ports(tmp_path) == (("mlx5_0:1",), ("mlx5_1:1",))


def test_this_machine_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    facts = facts_of_this_node("192.0.2.1", str(tmp_path))
    assert (facts.version, facts.code, facts.model) == (VERSION, digest_of_code(), "")
    assert facts.settings["UCX_TLS"] == "tcp"
    assert facts.packages["nixl"]
    assert facts.cores >= 1
    assert facts.shared_memory_bytes >= facts.shared_memory_free_bytes > 0
    (tmp_path / "config.json").write_text("{}")
    assert facts_of_this_node("192.0.2.1", str(tmp_path)).model
    assert facts_of_this_node("192.0.2.1", None).model is None


def test_facts_of_another_version_are_read_as_far_as_they_are_known():
    plain = asdict(HERE) | {"shoe_size": 43}
    assert NodeFacts.read(plain) == HERE
    del plain["cores"]
    assert NodeFacts.read(plain).cores == 0


class ScriptedExaminer:
    """An actor as `examine` calls it; a method that a test replaces fails there, or hangs."""

    def __init__(self, name: str, **replaced: Callable[..., Any]) -> None:
        self._name = name
        methods = {
            "clock": self._clock,
            "facts": self._facts,
            "open": self._open,
            "measure": self._measure,
        }
        for method, function in (methods | replaced).items():
            setattr(self, method, SimpleNamespace(remote=function))

    async def _clock(self) -> float:
        return time.time()

    async def _facts(self, model: str | None) -> dict[str, Any]:
        return asdict(replace(HERE, name=self._name, model=model))

    async def _open(self, name: str, piece_bytes: int, floor: float) -> str:
        return self._name

    async def _measure(self, peer: str) -> Reading:
        return Reading(1e9, "UCX", (f"{self._name} from {peer}",), "")


def raising(error: Exception) -> Callable[..., Any]:
    async def method(*_: object) -> None:
        raise error

    return method


async def hang(*_: object) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


async def examined(**actors: ScriptedExaminer) -> tuple[dict[str, Node], dict[str, NodePair]]:
    seats = [Seat(name, actor) for name, actor in actors.items()]
    nodes, pairs = await examine(seats, Wanted())
    return {node.name: node for node in nodes}, {str(pair): pair for pair in pairs}


async def test_each_reads_from_each():
    nodes, pairs = await examined(**{name: ScriptedExaminer(name) for name in "abc"})
    assert list(nodes) == ["a", "b", "c"]
    assert {(pair.reader, pair.source) for pair in pairs.values()} == set(
        itertools.permutations("abc", 2)
    )
    assert all(pair.lanes == (f"{pair.reader} from {pair.source}",) for pair in pairs.values())


async def test_what_fails_on_one_node_is_said_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("kvrelay.deploy.examination.examine.GIVE_UP_SECONDS", 0.1)

    async def old(model: str | None) -> dict[str, Any]:
        return asdict(replace(HERE, version="0.0.9"))

    answers = iter([time.time()])

    async def hang_later() -> float:
        return next(answers, 0.0) or await hang()

    nodes, pairs = await examined(
        a=ScriptedExaminer("a"),
        b=ScriptedExaminer("b"),
        dead=ScriptedExaminer("dead", facts=raising(RayError("long\nits node died"))),
        freezes=ScriptedExaminer("freezes", clock=hang_later),
        hangs=ScriptedExaminer("hangs", clock=hang),
        lacks=ScriptedExaminer("lacks", open=raising(RayError("no nixl"))),
        old=ScriptedExaminer("old", facts=old, open=hang),
        slow=ScriptedExaminer("slow", open=hang),
    )
    assert nodes["dead"].error == "no process of kvrelay runs there: its node died"
    for name in ("freezes", "hangs"):
        assert nodes[name].error == "no process of kvrelay has answered there in 0.1 s"
    assert nodes["lacks"].nixl_error == "no nixl"
    assert nodes["slow"].nixl_error == "it was not ready in 0.1 s"
    assert (nodes["old"].error, nodes["old"].nixl_error) == ("", "")
    assert sorted(pairs) == ["a reads from b", "b reads from a"]
    fails = {(one.where, one.check) for one in found(*nodes.values()) if one.level is FAIL}
    assert fails == {
        ("dead", "process"),
        ("freezes", "process"),
        ("hangs", "process"),
        ("lacks", "nixl"),
        ("old", "version"),
        ("slow", "nixl"),
    }


async def test_a_pair_that_cannot_be_read_is_said_and_the_other_direction_is_measured(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("kvrelay.deploy.examination.examine.GIVE_UP_SECONDS", 0.1)
    died = raising(RayError("died"))
    _, pairs = await examined(
        a=ScriptedExaminer("a", measure=hang),
        b=ScriptedExaminer("b", measure=died),
        c=ScriptedExaminer("c"),
    )
    assert pairs["a reads from b"].refusal == "no answer in 0.1 s"
    assert pairs["b reads from c"].refusal == "died"
    assert not pairs["c reads from a"].refusal
    assert len(pairs) == 6


def test_a_models_config_says_how_it_runs_and_what_it_needs(tmp_path: Path):
    """Nothing but config.json is there."""
    assert finding_of_model(tmp_path) is None
    fields: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "eos_token_id": 151645,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    finding = known(finding_of_model(tmp_path))
    assert (finding.level, finding.check) == (OK, "config.json")
    assert finding.text == (
        "Qwen3MoeForCausalLM, computed by native code; 30.5 billion weights: 56.9 GiB in "
        "bfloat16; KV of a sequence: 94 MiB for 1000 tokens, 3840 MiB for 40960 tokens (the most)"
    )
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_experts_per_tok": 500}))
    finding = known(finding_of_model(tmp_path))
    assert finding.level is FAIL
    assert "num_experts_per_tok" in finding.text


def test_a_node_whose_torch_does_not_load_has_its_other_facts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "kvrelay.cpu_kernels.processor", None)
    facts = with_processor(HERE)
    assert facts.processor.startswith("not known: import of kvrelay.cpu_kernels.processor")
    assert replace(facts, processor="") == HERE
