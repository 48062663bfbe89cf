"""A worker that starts at once, serves nothing, and fails when it is told to.

Its orders lie in the folder that would be its model's, as files: whatever
process it is in finds them there.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
import uuid
from pathlib import Path

from kvrelay.deploy.nodes.worker_host import BuildWorker, WorkerHost
from kvrelay.engine.config import WorkerConfig
from kvrelay.engine.worker.worker_lease import WorkerLease
from kvrelay.wire.worker_info import WorkerInfo
from tests.worker_infos import worker_info


class ObedientWorker:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._folder = config.model_path
        self._drains = asyncio.Event()
        self.lease = WorkerLease()

    async def start(self) -> WorkerInfo:
        with self._order("starts").open("a") as file:
            file.write(f"{os.getpid()}\n")
        match self.take("start"):
            case "refuse":
                raise ValueError("kv_memory: 1 byte does not hold\n one page")
            case "hang":
                self._order("hangs").write_text(str(os.getpid()))
                await asyncio.Event().wait()
            case "crash":
                os._exit(1)
            case "port":
                raise OSError(errno.EADDRINUSE, "Address already in use")
            case "miss":
                raise ModuleNotFoundError("No module named 'nixl'", name="nixl")
        return worker_info(
            self._config.name,
            role=self._config.role,
            incarnation=f"{self._config.name}-{uuid.uuid4().hex[:8]}",
            pid=os.getpid(),
        )

    @property
    def weights_read(self) -> float:
        return 0.5

    async def stop(self) -> None:
        (self._folder / f"{self._config.name}.stopped").touch()

    def begin_drain(self) -> None:
        self._drains.set()

    async def draining(self) -> None:
        await self._drains.wait()

    async def quarantine_too_old(self) -> None:
        while not self._order("old").exists():
            await asyncio.sleep(0.02)

    async def drain_if_quarantine_too_old(self) -> bool:
        self._order("asked").touch()
        if not self.take("old"):
            return False
        self.begin_drain()
        return True

    async def drained(self) -> None:
        """As one whose requests take as long as the test wants."""
        await self._drains.wait()
        while not self.take("leave"):
            await asyncio.sleep(0.02)

    async def failed(self) -> str:
        while not self.take("fail"):
            await asyncio.sleep(0.02)
        return "told to"

    async def heartbeat(self) -> None:
        if seconds := self.take("heartbeat"):
            await asyncio.sleep(float(seconds))

    async def peer_died(self, incarnation: str) -> None:
        if self.take("told"):
            raise RuntimeError("not in the mood")
        with (self._folder / f"{self._config.name}.heard").open("a") as file:
            file.write(incarnation + "\n")

    def take(self, order: str) -> str:
        """The next line of an order, which is thereby gone."""
        path = self._order(order)
        if not path.exists():
            return ""
        first, _, rest = path.read_text().partition("\n")
        path.write_text(rest) if rest else path.unlink()
        return first

    def _order(self, order: str) -> Path:
        return self._folder / f"{self._config.name}.{order}"


class ObedientHost(WorkerHost):
    """Its process is slow to begin, if it is told to be."""

    def __init__(self, config: WorkerConfig, build: BuildWorker, log_level: int) -> None:
        super().__init__(config, build, log_level)
        time.sleep(float(ObedientWorker(config).take("born") or 0))
        while (config.model_path / f"{config.name}.hold").exists():
            time.sleep(0.02)
        (config.model_path / f"{config.name}.begun").touch()


def give_order(folder: Path, worker: str, order: str, *lines: str) -> None:
    """Orders are ``born``, ``start``, ``fail``, ``told``, ``heartbeat``, ``leave``, ``old``.

    Those that take a time, in seconds, are ``born`` and ``heartbeat``. As long as there is a
    ``hold``, no process of the worker is born.

    A worker takes one of the order's lines each time.
    """
    write_at_once(folder / f"{worker}.{order}", "\n".join(lines))


def write_at_once(path: Path, text: str) -> None:
    """Another process, which may look at any moment, finds no part of it."""
    being_written = path.with_name(f"{path.name}.being_written")
    being_written.write_text(text)
    being_written.rename(path)
