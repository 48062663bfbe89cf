"""The options that say on which machines a cluster's workers run, and where they listen there."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.options.listen_address import Address
from kvrelay.net.addresses import is_loopback
from kvrelay.options.declaration import Section, flag_of, option, options_of

_ALONE: Final = {"cluster_name", "worker_gpus", "worker_cpus", "placement_timeout"}
"""The options that can be given without --ray-address."""
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_LABEL: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?")
_ACCELERATOR: Final = "ray.io/accelerator-type"
_RESOURCE: Final = "resource."


class Spread(StrEnum):
    """The ways in which the workers of a role are spread over nodes."""

    SPREAD = "spread"
    """The workers run on as many nodes as there are."""
    PACK = "pack"
    """The workers run on as few nodes as possible."""
    STRICT_SPREAD = "strict-spread"
    """Each worker has a node of its own, or none starts."""
    STRICT_PACK = "strict-pack"
    """All workers run on one node, or none starts."""

    @property
    def strategy(self) -> str:
        """Ray's name for it."""
        return self.value.upper().replace("-", "_")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes that a role's workers may run on, and their use of custom resources.

    Read from `rack=a,accelerator=H100,resource.fast=1`.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """Parse the form above. Raises ValueError, with a message that says what is wrong."""
        labels: dict[str, str] = {}
        resources: dict[str, float] = {}
        for key, value in _pairs(text):
            if not value:
                raise ValueError(f"{key!r} is not LABEL=VALUE")
            if key.startswith(_RESOURCE):
                resources[key.removeprefix(_RESOURCE)] = _amount(key, value)
            else:
                labels[_ACCELERATOR if key == "accelerator" else key] = value
        return cls(labels, resources)

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.labels.items())


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The options for clusters of several machines; checked by `check_machines`."""

    ray_address: str | None = option(
        None,
        "The Ray cluster to place workers in: auto for the one that this machine is a node of, or "
        "its head's address. It is left as it is at the end. RAY_AUTH_TOKEN has its token.",
        Section.MACHINES,
        metavar="auto|HOST:PORT",
        shown_default="a Ray of its own on this machine",
    )
    cluster_name: str = option(
        "default",
        "Distinguishes clusters: it is their label in Prometheus, and a second one of a name is "
        "refused in one Ray.",
        Section.MACHINES,
    )
    advertise: str = option(
        "",
        "Where workers listen and are reached, in place of their nodes' addresses: NODE=HOST for "
        "each node, by its address or name, or one HOST for all, separated by commas.",
        Section.MACHINES,
        metavar="NODE=HOST,...",
        shown_default="the address of each node in Ray",
    )
    prefill_on: str = option(
        "",
        "The nodes for prefill workers: LABEL=VALUE, accelerator=TYPE, and what a worker takes of "
        "a custom resource, resource.NAME=AMOUNT, separated by commas.",
        Section.MACHINES,
        metavar="LABEL=VALUE,...",
        shown_default="any",
    )
    decode_on: str = option(
        "",
        "The nodes for decode workers.",
        Section.MACHINES,
        metavar="LABEL=VALUE,...",
        shown_default="any",
    )
    aggregated_on: str = option(
        "",
        "The nodes for aggregated workers.",
        Section.MACHINES,
        metavar="LABEL=VALUE,...",
        shown_default="any",
    )
    near: str = option(
        "",
        "A label of nodes, as rack: prefill and decode workers are placed beside each other, on "
        "nodes with the same value, where there is room, and routers pair them as long as their "
        "load allows it.",
        Section.MACHINES,
        metavar="LABEL",
        shown_default="all nodes are as near",
    )
    copy_model: bool = option(
        False,
        "Copy the model from this machine to the cache of each node that does not have it at its "
        "path, through Ray's object store.",
        Section.MACHINES,
    )
    spread: Spread = option(
        Spread.SPREAD,
        "Where the workers of a role run: spread over as many nodes as there are, or packed on as "
        "few as can be; strict: each on a node of its own, or all on one node, or none.",
        Section.MACHINES,
    )
    worker_cpus: int = option(
        1,
        "CPUs that one worker takes of its node in Ray; with --ray-address also the threads that "
        "it computes with, unless --threads says.",
        Section.MACHINES,
        at_least=1,
    )
    worker_gpus: float | None = option(
        None,
        "GPUs that one worker takes of its node in Ray, on --device cuda. One with a part of a GPU "
        "takes as large a part of --kv-memory auto.",
        Section.MACHINES,
        more_than=0,
        shown_default="1; without --ray-address an equal share of all",
    )
    placement_timeout: float = option(
        30.0,
        "Seconds that Ray may take to find room for the workers of a role. Give minutes where an "
        "autoscaler brings nodes.",
        Section.MACHINES,
        more_than=0,
        unit="seconds",
    )

    @property
    def joins_ray(self) -> bool:
        """Whether workers run in a Ray that is there already."""
        return self.ray_address is not None

    @property
    def advertised(self) -> Mapping[str, str]:
        """The hosts at which workers listen, by node's address or name; "": all other nodes."""
        return _advertised(self.advertise)

    @property
    def listens_on_loopback(self) -> bool:
        """Whether no worker can be reached from another machine."""
        hosts = self.advertised.values()
        return not self.joins_ray or ("" in self.advertised and all(map(is_loopback, hosts)))

    def nodes_for(self, role: str) -> Nodes:
        """Return the nodes that a role's workers may run on."""
        return Nodes.parse(getattr(self, f"{role}_on"))

    def check_machines(self) -> None:
        """Raise OptionError for the first option that cannot be used."""
        if not _NAME.fullmatch(self.cluster_name):
            raise OptionError(
                "--cluster-name",
                f"{self.cluster_name!r} is not up to 40 small letters, digits and dashes between "
                "them",
            )
        if self.ray_address not in (None, "auto"):
            try:
                Address.parse(str(self.ray_address))
            except ValueError as error:
                raise OptionError("--ray-address", f"{error}, or auto") from error
        try:
            _advertised(self.advertise)
        except ValueError as error:
            raise OptionError("--advertise", str(error)) from error
        for role in ("prefill", "decode", "aggregated"):
            try:
                self.nodes_for(role)
            except ValueError as error:
                raise OptionError(flag_of(f"{role}_on"), str(error)) from error
        if self.near and not _LABEL.fullmatch(self.near):
            raise OptionError("--near", f"{self.near!r} is not the name of a label")
        if not self.joins_ray:
            self._check_alone()

    def _check_alone(self) -> None:
        for one in options_of(MachineOptions):
            if one.name in _ALONE:
                continue
            if getattr(self, one.name) != one.default:
                raise OptionError(one.flag, "must be given with --ray-address")


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of `a=b,c=d`; the second of a pair is empty where there is no `=`."""
    for part in _parts(text):
        key, _, value = part.partition("=")
        yield key.strip(), value.strip()


def _parts(text: str) -> Iterator[str]:
    return filter(None, (part.strip() for part in text.split(",")))


def _advertised(text: str) -> dict[str, str]:
    """Return the hosts by node. Raises ValueError, with a message that says what is wrong."""
    hosts: dict[str, str] = {}
    for part in _parts(text):
        node, equals, host = (one.strip() for one in part.rpartition("="))
        if equals and not node:
            raise ValueError(f"{part!r} is not NODE=HOST or HOST")
        if not _is_host(host):
            raise ValueError(f"{part!r}: {host!r} is no name or address; IPv6 needs no brackets")
        if node in hosts:
            raise ValueError(
                f"{node or 'every other node'} has two hosts, {hosts[node]} and {host}"
            )
        hosts[node] = host
    return hosts


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST.fullmatch(text) is not None
    return True


def _amount(key: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = 0
    if not amount > 0:
        raise ValueError(f"{key}={text}: is not an amount above 0")
    return amount
