"""`kvrelay doctor`: a check of nodes and links before a cluster runs on them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvrelay.deploy.command_errors import FAILED, with_clear_errors
from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.options.environment import allow_many_machines
from kvrelay.deploy.options.machine_options import MachineOptions
from kvrelay.deploy.options.option_flags import declared_options
from kvrelay.deploy.options.option_types import SIZE

if TYPE_CHECKING:
    from kvrelay.deploy.examination.findings import Finding, Node, NodePair
    from kvrelay.deploy.nodes.joined_ray import JoinedRay
    from kvrelay.deploy.nodes.local_ray import LocalRay

_LEAST_PIECE_BYTES = 64


@click.command(context_settings={"show_default": True})
@declared_options(MachineOptions, {"ray_address", "advertise"})
@click.option(
    "--model",
    metavar="PATH",
    help="A checkpoint's folder that every node is to have. Its config.json says first whether and "
    "how it would run and what it needs in memory; then the whole of it is read on each node.",
)
@click.option(
    "--piece-size",
    type=SIZE,
    default="2MiB",
    help="What is read at a time: a page of KV, all layers together.",
)
@click.option(
    "--min-transfer-gigabytes-per-second",
    "floor",
    type=click.FloatRange(0),
    default=0.0,
    help="A pair of nodes that is read more slowly has failed, in 10^9 bytes a second.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@with_clear_errors
def doctor(
    *,
    debug: bool,
    ray_address: str | None,
    advertise: str,
    model: str | None,
    piece_size: int,
    floor: float,
    as_json: bool,
) -> None:
    """Examine the nodes of a Ray cluster, or this machine, and measure every pair of them.

    A process on each node looks at versions, NIXL, memory and clock. It reads from the other nodes'
    processes as a decode worker reads from a prefill worker. It takes nothing that Ray counts, and
    ends with the command, so this can be run beside a cluster. It takes a little of the cluster's
    network and cores. Each finding is one line: ok, warn or fail, and what to do. Exit status: 0 if
    nothing has failed, 1 if something has, or the command itself.
    """
    options = MachineOptions(ray_address=ray_address, advertise=advertise)
    options.check_machines()
    if piece_size < _LEAST_PIECE_BYTES:
        raise OptionError("--piece-size", f"must be at least {_LEAST_PIECE_BYTES} bytes")
    with redirect_stdout(sys.stderr), _ray(ray_address):  # Ray prints warnings to both
        from kvrelay.deploy.examination.examine import Wanted, examine, examiners
        from kvrelay.deploy.examination.facts import facts_of_this_node
        from kvrelay.deploy.examination.findings import finding_of_model, findings_of

        of_model = None if model is None else finding_of_model(Path(model))
        if of_model is not None:
            _say(_as_text(of_model))
            if of_model.level == "fail":
                model = None  # nobody needs to read it
        with examiners(options.advertised) as seats:
            wanted = Wanted(model, piece_size, floor * 1e9)
            nodes, pairs = asyncio.run(examine(seats, wanted, _say))
        here = facts_of_this_node("", None)
    findings = findings_of(nodes, pairs, here, piece_size)
    if of_model is not None:
        findings.insert(0, of_model)
    if as_json:
        click.echo(json.dumps(_as_object(findings, nodes, pairs)))
    else:
        for finding in findings:
            click.echo(_as_text(finding))
        click.echo(_summary(findings, nodes, pairs))
    if any(finding.level == "fail" for finding in findings):
        sys.exit(FAILED)


def _ray(address: str | None) -> AbstractContextManager[LocalRay | JoinedRay]:
    if address is None:
        from kvrelay.deploy.nodes.local_ray import LocalRay

        return LocalRay(1)
    allow_many_machines()
    from kvrelay.deploy.nodes.joined_ray import JoinedRay, namespace_of

    return JoinedRay(address, namespace_of("doctor"))


def _say(line: str) -> None:
    click.echo(f"kvrelay: {line}", err=True)


def _as_text(finding: Finding) -> str:
    line = f"{finding.level:<5}{finding.where}  {finding.check}: {finding.text}"
    return f"{line}. To do: {finding.advice}" if finding.advice else line


def _summary(findings: Sequence[Finding], nodes: Sequence[Node], pairs: Sequence[NodePair]) -> str:
    levels = Counter(finding.level.value for finding in findings)
    measured = f"{len(nodes)} nodes examined, {len(pairs)} directions measured"
    return f"{measured}: {levels['fail']} failures, {levels['warn']} warnings"


def _as_object(
    findings: Sequence[Finding], nodes: Sequence[Node], pairs: Sequence[NodePair]
) -> dict[str, Any]:
    return {
        "findings": [asdict(finding) for finding in findings],
        "nodes": [asdict(node) for node in nodes],
        "pairs": [asdict(pair) for pair in pairs],
    }
