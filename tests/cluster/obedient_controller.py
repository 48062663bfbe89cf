"""A controller of obedient workers, which dies where it is told to.

It is told by a file, ``controller.dies``, in the folder where its workers' orders lie: ``before``
or ``after`` and what it is about to write down, as `name_of` calls it. It writes before it acts
and after, so these are the points between which its acts lie. When it dies it leaves its pid in
``controller.died``, and the order is gone.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import ClassVar

from kvrelay.deploy.controller.controller_host import ControllerHost
from kvrelay.deploy.controller.records.key_value_store import KeyValueStore
from kvrelay.deploy.nodes import worker_host
from kvrelay.options.observing import LogFormat
from kvrelay.wire.worker_info import WorkerRole
from tests.cluster.obedient_worker import ObedientHost, ObedientWorker

DIES = "controller.dies"
DIED = "controller.died"


class ObedientController(ControllerHost):
    folder: ClassVar[Path]
    """Of the orders."""

    def __init__(self, namespace: str, log_level: int, log_format: LogFormat) -> None:
        worker_host.BUILDERS.update(dict.fromkeys(WorkerRole, ObedientWorker))
        worker_host.WorkerHost = ObedientHost  # type: ignore[misc]
        super().__init__(namespace, log_level, log_format)

    def make_store(self) -> KeyValueStore:
        return DeadlyStore(super().make_store(), self.folder)


class DeadlyStore:
    def __init__(self, store: KeyValueStore, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self.get, self.keys, self.put_new = store.get, store.keys, store.put_new

    async def put(self, key: str, value: bytes) -> None:
        name = name_of(key, value)
        self._die("before", name)
        await self._store.put(key, value)
        self._die("after", name)

    async def delete(self, key: str) -> None:
        name = f"no {name_of(key, b'')}"
        self._die("before", name)
        await self._store.delete(key)
        self._die("after", name)

    def _die(self, when: str, name: str) -> None:
        order = self._folder / DIES
        if order.exists() and order.read_text() == f"{when} {name}":
            (self._folder / DIED).write_text(str(os.getpid()))
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def name_of(key: str, value: bytes) -> str:
    """What is written, as ``decode-0 planned``."""
    kind, _, name = key.partition("/")[2].partition("/")[2].partition("/")
    if kind == "death":
        return f"death of {name.rpartition('-')[0]}"
    if kind not in ("cluster", "worker") or not value:
        return f"{kind} {name}".strip()
    read = json.loads(value)
    if kind == "cluster":
        return f"cluster {read['phase']}{' changing' if read['change'] else ''}"
    stage = "started" if read["started"] else "placed" if read["place"] else "planned"
    marks = [mark for mark in ("draining", "removing") if read[mark]]
    return " ".join([name, stage, *marks])
