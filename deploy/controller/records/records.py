"""What a controller writes down for its successor: of the cluster, and of each worker.

Small JSON objects, each with the version of their form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from kvrelay.deploy.controller.changes.replacement_order import FIRST, Revision, Roll
from kvrelay.deploy.controller.changes.wanted import Changes
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.worker_process import ProcessIdentity
from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

VERSION: Final = 2


class ClusterPhase(StrEnum):
    """How far a cluster has come."""

    STARTING = "starting"
    """Its first workers have not all started; if one does not, all end."""
    SERVING = "serving"
    """Its workers are replaced when they die."""
    STOPPING = "stopping"
    """All of its workers are being ended, for good."""


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """What the cluster is to be. The workers that it is to have are those with a record."""

    phase: ClusterPhase = ClusterPhase.STARTING
    names: frozenset[str] = frozenset()
    """Of all workers that there were ever to be: no new one can have them."""
    change: Changes | None = None
    """Of the number of workers; it is under way."""
    revision: Revision = FIRST
    """Of the options: what a worker gets that is added."""
    previous: Revision | None = None
    """What `revision` was before the last roll; None: there was none."""
    roll: Roll | None = None
    """It is under way, or has stopped."""
    successor: str = ""
    """The address of the controller that routers are to follow; empty: this cluster's."""

    def to_bytes(self) -> bytes:
        """For the store."""
        return _dump(asdict(self) | {"names": sorted(self.names)})

    @classmethod
    def from_bytes(cls, text: bytes) -> ClusterRecord:
        """From the store. Raises ClusterError for what another version has written."""
        read = _load(text)
        change = read["change"] and Changes(
            tuple((name, WorkerRole(role)) for name, role in read["change"]["added"]),
            tuple(read["change"]["removed"]),
        )
        return cls(
            ClusterPhase(read["phase"]),
            frozenset(read["names"]),
            change,
            Revision(**read["revision"]),
            read["previous"] and Revision(**read["previous"]),
            read["roll"] and Roll.from_plain(read["roll"]),
            read["successor"],
        )


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """Where a worker's actor is placed."""

    group: str
    """The name of a placement group."""
    index: int
    """Of the bundle in it."""


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that has started."""

    info: WorkerInfo
    process: ProcessIdentity | None
    """What it runs in; None where the system does not say it."""
    node: str = ""
    """The address of its node in Ray."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker that there is to be, or that is about to leave, and its latest incarnation."""

    name: str
    role: WorkerRole
    place: ActorPlace | None = None
    """None: it has none yet, or needs none."""
    started: Started | None = None
    """The incarnation that others may know; None: there was none yet."""
    draining: bool = False
    """That incarnation was told to drain, or is about to be."""
    removing: bool = False
    """No other incarnation follows."""
    revision: Revision = FIRST
    """Of the options that it has."""

    def to_bytes(self) -> bytes:
        """For the store."""
        return _dump(asdict(self))

    @classmethod
    def from_bytes(cls, text: bytes) -> WorkerRecord:
        """From the store. Raises ClusterError for what another version has written."""
        read = _load(text)
        return cls(
            name=read["name"],
            role=WorkerRole(read["role"]),
            place=read["place"] and ActorPlace(**read["place"]),
            started=read["started"] and _started(read["started"]),
            draining=read["draining"],
            removing=read["removing"],
            revision=Revision(**read["revision"]),
        )


@dataclass(frozen=True, slots=True)
class Records:
    """All that a controller has written down."""

    cluster: ClusterRecord = field(default_factory=ClusterRecord)
    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)
    """By name."""
    deaths: frozenset[str] = frozenset()
    """Incarnations whose processes have ended, of which perhaps not all others know."""


def _started(read: Mapping[str, Any]) -> Started:
    info = dict(read["info"])
    info["role"] = WorkerRole(info["role"])
    info["eos_token_ids"] = tuple(info["eos_token_ids"])
    info["model"] = ModelDigest(**info["model"])
    process = read["process"] and ProcessIdentity(**read["process"])
    return Started(WorkerInfo(**info), process, read["node"])


def _dump(read: Mapping[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, **read}).encode()


def _load(text: bytes) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(text)
    if read.pop("version") != VERSION:
        raise ClusterError("another version of kvrelay has written the cluster's records")
    return read
