"""The rules that turn facts of nodes and pairs into findings."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvrelay.deploy.examination.facts import NodeFacts
from kvrelay.deploy.options.sizes import format_size

_LEAST_SHARED_BYTES: Final = 1 << 30
_LEAST_SHARED_FREE_BYTES: Final = 64 << 20
_LEAST_LOCKED_BYTES: Final = 64 << 30
_LEAST_FILES: Final = 4096
_CLOCK_WARN_SECONDS: Final = 1.0
_SOME_TOKENS: Final = 1000
"""The length of a sequence whose KV is told."""
_CLOCK_FAIL_SECONDS: Final = 60.0
_SLOW_SHARE: Final = 0.5
"""The share of the median speed below which a pair is reported as slow."""


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """It works, slower or less safely than it could."""
    FAIL = "fail"
    """Workers there would not start, or would not work together."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    where: str
    """The name of a node, or of two."""
    check: str
    text: str
    advice: str = ""
    """The advice on what to do; empty where nothing is to be done."""


@dataclass(frozen=True, slots=True)
class Node:
    """The results of one node's examination."""

    name: str
    """The node's name in findings."""
    error: str = ""
    """The reason why no process could be examined there; empty: one was."""
    facts: NodeFacts = field(default_factory=NodeFacts)
    clock_seconds: float = 0.0
    """The seconds by which its clock is ahead of this machine's."""
    clock_error_seconds: float = 0.0
    """The greatest error of `clock_seconds`."""
    nixl_error: str = ""
    """The reason why NIXL cannot be used there; empty: it can."""


@dataclass(frozen=True, slots=True)
class NodePair:
    """The results of one direction between two nodes."""

    reader: str
    source: str
    bytes_per_second: float = 0.0
    backend: str = ""
    lanes: tuple[str, ...] = ()
    refusal: str = ""
    """The reason why nothing could be read; empty: it could."""

    def __str__(self) -> str:
        return f"{self.reader} reads from {self.source}"


def findings_of(
    nodes: Sequence[Node], pairs: Sequence[NodePair], here: NodeFacts, piece_bytes: int
) -> list[Finding]:
    """Return all findings, node by node, then pair by pair.

    Args:
        nodes: the examined nodes.
        pairs: the measured pairs.
        here: the machine where the command runs, which the others are compared with.
        piece_bytes: the bytes of one read.
    """
    return [
        *(finding for node in nodes for finding in _of_node(node, here)),
        *_of_all(nodes),
        *_of_pairs(pairs, piece_bytes),
    ]


def _of_node(node: Node, here: NodeFacts) -> Iterator[Finding]:
    if node.error:
        advice = "the raylet's log there (/tmp/ray/session_latest/logs) says more; install the same"
        yield Finding(
            Level.FAIL, node.name, "process", node.error, f"{advice} kvrelay on every node"
        )
        return
    for check, rule in _RULES.items():
        if check != "model" or node.facts.model is not None:
            level, text, advice = rule(node, here)
            yield Finding(level, node.name, check, text, advice)


def finding_of_model(folder: Path) -> Finding | None:
    """Say from config.json alone whether and how a model runs; None: it is not on this machine."""
    if not (folder / "config.json").is_file():
        return None
    from kvrelay.model_runner.errors import CheckpointError
    from kvrelay.model_runner.model_needs import find_needs

    try:
        needs = find_needs(folder)
    except CheckpointError as error:
        advice = "see docs/models.md for what is served"
        return Finding(Level.FAIL, folder.name, "config.json", str(error), advice)
    stored = ", stored in fewer bits" if needs.is_quantized else ""
    lengths = (_SOME_TOKENS, needs.max_model_len)
    kv = (f"{needs.kv_bytes(one) / 2**20:.0f} MiB for {one} tokens" for one in lengths)
    text = (
        f"{needs.architecture}, computed by {needs.code.value} code; "
        f"{needs.num_weights / 1e9:.3g} billion weights: {_rough(needs.weight_bytes())} in "
        f"bfloat16{stored}; KV of a sequence: {', '.join(kv)} (the most)"
    )
    return Finding(Level.OK, folder.name, "config.json", text)


_Verdict = tuple[Level, str, str]
"""Severity, fact, and advice."""


def _version(node: Node, here: NodeFacts) -> _Verdict:
    facts = node.facts
    if facts.version != here.version:
        return Level.FAIL, f"kvrelay {facts.version}, here {here.version}", "install the same"
    if facts.code != here.code:
        advice = "install it anew where files were changed"
        return Level.WARN, f"kvrelay {facts.version} with other files than here", advice
    return Level.OK, f"kvrelay {facts.version}, files {facts.code}", ""


def _packages(node: Node, here: NodeFacts) -> _Verdict:
    theirs, ours = node.facts.packages, here.packages
    unlike = [
        f"{name} {theirs.get(name) or 'missing'} (here {wanted})"
        for name, wanted in ours.items()
        if theirs.get(name) != wanted
    ]
    if unlike:
        return Level.WARN, ", ".join(unlike), "install the versions of constraints.txt everywhere"
    return Level.OK, ", ".join(f"{name} {one}" for name, one in theirs.items()), ""


def _nixl(node: Node, here: NodeFacts) -> _Verdict:
    if node.nixl_error:
        advice = "KV cannot be moved without: pip install nixl, for this CUDA"
        return Level.FAIL, f"NIXL cannot be used: {node.nixl_error}", advice
    facts = node.facts
    settings = ", ".join(f"{name}={value}" for name, value in facts.settings.items())
    up = [port for port in facts.rdma_ports if port not in facts.rdma_ports_down]
    devices = f"RDMA {', '.join(up)}" if up else "no RDMA, so KV goes over TCP"
    text = f"NIXL with UCX; {devices}; {settings or 'no UCX settings'}"
    if facts.rdma_ports_down:
        down = ", ".join(facts.rdma_ports_down)
        advice = "look at cable, switch and subnet manager (ibstat), or leave them out by "
        return Level.WARN, f"{text}; {down} is down", advice + "UCX_NET_DEVICES"
    return Level.OK, text, ""


def _memlock(node: Node, here: NodeFacts) -> _Verdict:
    limit, facts = node.facts.memlock_bytes, node.facts
    text = "unlimited" if limit is None else f"at most {format_size(limit)}"
    if facts.rdma_ports and limit is not None and limit < _LEAST_LOCKED_BYTES:
        advice = "RDMA locks all KV memory: LimitMEMLOCK=infinity for Ray's service, or IPC_LOCK"
        return Level.FAIL, text, f"{advice} for its container"
    return Level.OK, text if facts.rdma_ports else f"{text}; TCP locks nothing", ""


def _huge_pages(node: Node, here: NodeFacts) -> _Verdict:
    facts = node.facts
    made = facts.transparent_huge_pages or "none"
    text = f"transparent: {made}; reserved: {format_size(facts.huge_pages_bytes)}"
    if facts.rdma_ports and made in ("none", "never"):
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: a card that has to "
        return Level.WARN, text, advice + "know each 4 KiB page is slower"
    return Level.OK, text, ""


def _shared_memory(node: Node, here: NodeFacts) -> _Verdict:
    size, free = node.facts.shared_memory_bytes, node.facts.shared_memory_free_bytes
    text = f"{_rough(free)} free of {_rough(size)}"
    if free < _LEAST_SHARED_FREE_BYTES:
        advice = "remove what lies there; Ray's object store and UCX need it"
        return Level.FAIL, text, advice
    if size < _LEAST_SHARED_BYTES:
        advice = "Ray's object store lies there: docker run --shm-size, or an emptyDir with"
        return Level.WARN, text, f"{advice} medium: Memory"
    return Level.OK, text, ""


def _open_files(node: Node, here: NodeFacts) -> _Verdict:
    limit = node.facts.open_files
    text = "any number" if limit is None else f"at most {limit}"
    if limit is not None and limit < _LEAST_FILES:
        return Level.WARN, text, "ulimit -n 65536 before `ray start`: each connection is one"
    return Level.OK, text, ""


def _clock(node: Node, here: NodeFacts) -> _Verdict:
    sure = max(0.0, abs(node.clock_seconds) - node.clock_error_seconds)
    text = f"{node.clock_seconds:+.3f} s, known to {node.clock_error_seconds:.3f} s"
    advice = "let it follow a time server: certificates are valid by the clock, and logs differ"
    if sure > _CLOCK_FAIL_SECONDS:
        return Level.FAIL, text, advice
    return (Level.WARN, text, advice) if sure > _CLOCK_WARN_SECONDS else (Level.OK, text, "")


def _cores(node: Node, here: NodeFacts) -> _Verdict:
    facts = node.facts
    text = f"{facts.cores} cores on {facts.numa_nodes or 1} NUMA nodes"
    if facts.numa_nodes > 1:
        text += "; a worker keeps to one if its threads fit there"
    return Level.OK, text, ""


def _processor(node: Node, here: NodeFacts) -> _Verdict:
    facts = node.facts
    counts = Counter(facts.product_ways.values())
    ways = ", ".join(f"{count} by {way}" for way, count in counts.most_common())
    return Level.OK, f"{facts.processor or 'not known'}; products timed: {ways or 'none yet'}", ""


def _model(node: Node, here: NodeFacts) -> _Verdict:
    if not node.facts.model:
        return Level.FAIL, "is not there", "bring it to that path, or start with --copy-model"
    return Level.OK, f"digest {node.facts.model}", ""


_RULES: Final[dict[str, Callable[[Node, NodeFacts], _Verdict]]] = {
    "version": _version,
    "packages": _packages,
    "nixl": _nixl,
    "memlock": _memlock,
    "huge pages": _huge_pages,
    "shared memory": _shared_memory,
    "open files": _open_files,
    "clock": _clock,
    "cores": _cores,
    "processor": _processor,
    "model": _model,
}


def _of_all(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield a failure for each node whose checkpoint differs from the most common one."""
    digests = Counter(node.facts.model for node in nodes if node.facts.model)
    if len(digests) < 2:
        return
    [(most, _)] = digests.most_common(1)
    for node in nodes:
        if node.facts.model not in (None, "", most):
            text = f"another checkpoint than elsewhere, {node.facts.model} and not {most}"
            advice = "workers with other weights refuse each other: copy it anew"
            yield Finding(Level.FAIL, node.name, "model", text, advice)


def _of_pairs(pairs: Sequence[NodePair], piece_bytes: int) -> Iterator[Finding]:
    read = [pair.bytes_per_second for pair in pairs if not pair.refusal]
    median = statistics.median(read) if read else 0.0
    for pair in pairs:
        if pair.refusal:
            advice = "let all TCP ports between the nodes through, or the fabric's; --advertise and"
            yield Finding(
                Level.FAIL,
                str(pair),
                "transfer",
                pair.refusal,
                f"{advice} UCX_NET_DEVICES choose the network",
            )
            continue
        speed = f"{pair.bytes_per_second / 1e9:.3g} GB/s"
        by = f"{pair.backend} ({', '.join(pair.lanes) or 'transport not known'})"
        text = f"{speed} in pieces of {format_size(piece_bytes)} by {by}"
        if pair.bytes_per_second < _SLOW_SHARE * median:
            advice = "look at this link: it is much slower than the others"
            yield Finding(Level.WARN, str(pair), "transfer", text, advice)
        else:
            yield Finding(Level.OK, str(pair), "transfer", text)


def _rough(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
