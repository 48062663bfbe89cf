"""A controller's records, written before and after it acts, so that a successor can go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from kvrelay.deploy.controller.records.key_value_store import KeyValueStore, insisting
from kvrelay.deploy.controller.records.leases import Leases
from kvrelay.deploy.controller.records.records import ClusterRecord, Records, WorkerRecord

_TAKEN_OVER = "taken-over"


class Journal:
    """One controller's records. Each controller writes its own and reads its predecessor's.

    So nobody reads what a deposed predecessor still writes. A new controller copies all records and
    marks them as taken over before it acts. The records of the latest controller with that mark
    count. A store that does not answer is asked until it does. A controller whose lease is over
    writes nothing: its calls wait, for ever if it has a successor. No action is taken before its
    record is written. Writes run one at a time, and each attempt writes the record's present value.
    So a later change is never undone by an earlier attempt. A journal belongs to one event loop.

    Args:
        store: the store of the records.
        leases: tell the controller's epoch, and whether its lease is still held.
    """

    def __init__(self, store: KeyValueStore, leases: Leases) -> None:
        self._store = store
        self._leases = leases
        self._prefix = _prefix(leases.epoch)
        self._writing = asyncio.Lock()
        self.cluster = ClusterRecord()
        """The cluster's record in its present value, which may not be written yet."""
        self.workers: dict[str, WorkerRecord] = {}
        """The workers' records by name, likewise."""
        self._deaths: set[str] = set()
        """The recorded deaths by incarnation, likewise."""

    @classmethod
    async def take_over(
        cls, store: KeyValueStore, leases: Leases
    ) -> tuple[Journal, Records | None]:
        """Return a journal with the predecessor's records, and those records; None: there are none.

        None: there was no predecessor.
        """
        journal = cls(store, leases)
        keys = await insisting(lambda: store.keys("records/"))
        before = await _read_latest(store, keys)
        if before is not None:
            await journal._copy(before)
        await journal._write(_TAKEN_OVER)
        for key in keys:
            await journal._delete_key(key)
        return journal, before

    async def write_cluster(self, **changes: Any) -> None:
        """Change fields of the cluster's record."""
        self.cluster = replace(self.cluster, **changes)
        await self._write("cluster")

    async def add_worker(self, record: WorkerRecord) -> None:
        """Add the record of a worker that is wanted."""
        self.workers[record.name] = record
        await self._write(f"worker/{record.name}")

    async def write_worker(self, name: str, **changes: Any) -> None:
        """Change fields of a worker's record; do nothing if the record is gone."""
        if name in self.workers:
            await self.add_worker(replace(self.workers[name], **changes))

    async def remove_worker(self, name: str) -> None:
        """Remove the record of a worker that is no longer wanted, and of which nothing is left."""
        self.workers.pop(name, None)
        await self._write(f"worker/{name}")

    async def add_death(self, incarnation: str) -> None:
        """Record that a process has ended, before others are told."""
        self._deaths.add(incarnation)
        await self._write(f"death/{incarnation}")

    async def remove_death(self, incarnation: str) -> None:
        """Remove the record of a death of which all others have been told."""
        self._deaths.discard(incarnation)
        await self._write(f"death/{incarnation}")

    async def clear(self) -> None:
        """Delete all records except the one that says that the cluster was to stop."""
        self.workers.clear()
        self._deaths.clear()
        kept = (f"{self._prefix}cluster", f"{self._prefix}{_TAKEN_OVER}")
        for key in await insisting(lambda: self._store.keys("records/")):
            if key not in kept:
                await self._delete_key(key)

    async def _copy(self, before: Records) -> None:
        self.cluster = before.cluster
        await self._write("cluster")
        for record in before.workers.values():
            await self.add_worker(record)
        for death in before.deaths:
            await self.add_death(death)

    async def _write(self, key: str) -> None:
        """Write the record's present value to the store, or delete it there if it is gone here."""
        async with self._writing:
            await insisting(lambda: self._try_to_write(key))

    async def _try_to_write(self, key: str) -> None:
        await self._leases.until_held()
        value = self._value_of(key)
        if value is None:
            await self._store.delete(self._prefix + key)
        else:
            await self._store.put(self._prefix + key, value)

    def _value_of(self, key: str) -> bytes | None:
        kind, _, name = key.partition("/")
        match kind:
            case "cluster":
                return self.cluster.to_bytes()
            case "worker":
                return self.workers[name].to_bytes() if name in self.workers else None
            case "death":
                return b"" if name in self._deaths else None
        assert kind == _TAKEN_OVER
        return b""

    async def _delete_key(self, key: str) -> None:
        """Delete a key that nothing writes any more."""
        async with self._writing:
            await insisting(lambda: self._store.delete(key))


async def read_records(store: KeyValueStore) -> Records | None:
    """Return the records of the latest controller; None: there is none."""
    return await _read_latest(store, await insisting(lambda: store.keys("records/")))


async def _read_latest(store: KeyValueStore, keys: list[str]) -> Records | None:
    epochs = [int(key.split("/")[1]) for key in keys if key.endswith(f"/{_TAKEN_OVER}")]
    return await _read(store, keys, _prefix(max(epochs))) if epochs else None


def _prefix(epoch: int) -> str:
    return f"records/{epoch}/"


async def _read(store: KeyValueStore, keys: list[str], prefix: str) -> Records:
    """Read the records under a prefix. Raises ClusterError if another version has written them."""
    cluster, workers, deaths = ClusterRecord(), {}, set()
    for key in keys:
        if not key.startswith(prefix):
            continue
        kind, _, name = key.removeprefix(prefix).partition("/")
        if kind == "death":
            deaths.add(name)
        elif kind in ("cluster", "worker"):
            text = await insisting(lambda key=key: store.get(key))  # type: ignore[misc]
            if text is None:
                continue  # its writer, which is still there, has deleted it just now
            if kind == "cluster":
                cluster = ClusterRecord.from_bytes(text)
            else:
                workers[name] = WorkerRecord.from_bytes(text)
    return Records(cluster, workers, frozenset(deaths))
