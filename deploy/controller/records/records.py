"""The records that a controller writes for its successor: of the cluster, and of each worker.

They are small JSON objects, each with the version of its format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from kvrelay.deploy.controller.records.ordered_changes import FIRST, Changes, Revision, Roll
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.started_worker import ActorPlace, Started
from kvrelay.deploy.nodes.worker_process import ProcessIdentity
from kvrelay.wire.model_digest import ModelDigest
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole

VERSION: Final = 2


class ClusterPhase(StrEnum):
    """A phase in the life of a cluster."""

    STARTING = "starting"
    """The first workers have not all started; if one fails, all end."""
    SERVING = "serving"
    """Its workers are replaced when they die."""
    STOPPING = "stopping"
    """All of its workers are being ended, for good."""


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """The record of the cluster. The workers that are wanted have a record each."""

    phase: ClusterPhase = ClusterPhase.STARTING
    names: frozenset[str] = frozenset()
    """The names of all workers that were ever wanted: no new worker can have one of them."""
    change: Changes | None = None
    """The change of the number of workers that is under way; None: none is."""
    revision: Revision = FIRST
    """The revision of the options that added workers get."""
    previous: Revision | None = None
    """The value of `revision` before the last roll; None: there was no roll."""
    roll: Roll | None = None
    """The roll that is under way, or has stopped; None: there is none."""
    successor: str = ""
    """The address of the controller that routers are to follow; empty: this cluster's."""

    def to_bytes(self) -> bytes:
        """Encode the record for the store."""
        return _dump(asdict(self) | {"names": sorted(self.names)})

    @classmethod
    def from_bytes(cls, text: bytes) -> ClusterRecord:
        """Decode a record. Raises ClusterError if another version has written it."""
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
class WorkerRecord:
    """One worker that is wanted or about to leave, and its latest incarnation."""

    name: str
    role: WorkerRole
    place: ActorPlace | None = None
    """The worker's place; None: it has none yet, or needs none."""
    started: Started | None = None
    """The incarnation that others may know; None: there was none yet."""
    draining: bool = False
    """Whether that incarnation was told to drain, or is about to be."""
    removing: bool = False
    """Whether no other incarnation follows."""
    revision: Revision = FIRST
    """The revision of the worker's options."""

    @property
    def process(self) -> ProcessIdentity | None:
        """The process of its latest incarnation, as far as it is known."""
        return None if self.started is None else self.started.process

    def to_bytes(self) -> bytes:
        """Encode the record for the store."""
        return _dump(asdict(self))

    @classmethod
    def from_bytes(cls, text: bytes) -> WorkerRecord:
        """Decode a record. Raises ClusterError if another version has written it."""
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
    """All records that a controller has written."""

    cluster: ClusterRecord = field(default_factory=ClusterRecord)
    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)
    """The workers' records by name."""
    deaths: frozenset[str] = frozenset()
    """The incarnations whose processes have ended, while some workers may not know it."""


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
