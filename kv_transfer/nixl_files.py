"""A `FileIO` that moves bytes between memory and files by NIXL's POSIX backend."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from kvrelay.kv_transfer.nixl_library import load_nixl
from kvrelay.mem_cache.storage.file_io import FilePiece

logger = logging.getLogger(__name__)

_BACKEND = "POSIX"


class NixlFileTransfer:
    """A `FileTransfer` in NIXL's hands.

    If it fails, NIXL says neither which bytes have not moved nor why. After that no byte moves any
    more. (This holds for Linux's asynchronous I/O, which NIXL uses by default.)
    """

    def __init__(self, agent: Any, make_handle: Callable[[], Any]) -> None:
        self._agent = agent
        self._handle: Any = None
        self._state = self._call(lambda _: self._begin(make_handle))

    def _begin(self, make_handle: Callable[[], Any]) -> str:
        self._handle = make_handle()
        return str(self._agent.transfer(self._handle))

    def poll(self) -> bool | None:
        """See `FileTransfer`. A transfer is released after its end: bytes would still arrive."""
        if self._state == "PROC":
            self._state = self._call(self._agent.check_xfer_state)
        if self._state == "PROC":
            return None
        if self._handle is not None:
            self._call(lambda handle: handle.release())
        return self._state == "DONE"

    def _call(self, function: Callable[[Any], Any]) -> str:
        try:
            return str(function(self._handle))
        except Exception as error:  # NIXL's exceptions have no common base
            logger.warning("NIXL could not move all bytes between memory and a file: %s", error)
            return "ERR"


class NixlFiles:
    """A `FileIO` with an agent of its own, which no peer knows and which never listens.

    Raises:
        RuntimeError: NIXL is not here, or has no POSIX backend.
    """

    def __init__(self) -> None:
        self._name = f"files-{uuid.uuid4().hex}"
        try:
            self._agent = _make_agent(self._name)
        except Exception as error:  # NIXL's exceptions have no common base
            raise RuntimeError(f"NIXL cannot use files here: {error}") from error
        self._memory: list[object] = []
        self._files: dict[int, object] = {}

    def add_memory(self, address: int, nbytes: int) -> None:
        """See `FileIO`."""
        self._memory.append(self._register((address, nbytes, 0, ""), "DRAM"))

    def add_file(self, file: int, nbytes: int) -> None:
        """See `FileIO`."""
        self._files[file] = self._register((0, nbytes, file, ""), "FILE")

    def remove_file(self, file: int) -> None:
        """See `FileIO`."""
        self._deregister(self._files.pop(file))

    def read(self, file: int, pieces: Sequence[FilePiece]) -> NixlFileTransfer:
        """See `FileIO`."""
        return self._start("READ", file, pieces)

    def write(self, file: int, pieces: Sequence[FilePiece]) -> NixlFileTransfer:
        """See `FileIO`."""
        return self._start("WRITE", file, pieces)

    def close(self) -> None:
        """See `FileIO`."""
        for region in (*self._files.values(), *self._memory):
            self._deregister(region)
        self._files.clear()
        self._memory.clear()
        self._agent = None

    def _register(self, region: tuple[int, int, int, str], kind: str) -> object:
        try:
            return self._agent.register_memory([region], kind, backends=[_BACKEND])
        except Exception as error:  # NIXL's exceptions have no common base
            raise OSError(f"NIXL did not take it: {error}") from error

    def _deregister(self, region: object) -> None:
        try:
            self._agent.deregister_memory(region, backends=[_BACKEND])
        except Exception as error:  # NIXL's exceptions have no common base
            logger.warning("NIXL does not let go of memory or of a file: %s", error)

    def _start(
        self, operation: Literal["READ", "WRITE"], file: int, pieces: Sequence[FilePiece]
    ) -> NixlFileTransfer:
        return NixlFileTransfer(self._agent, lambda: self._make_handle(operation, file, pieces))

    def _make_handle(
        self, operation: Literal["READ", "WRITE"], file: int, pieces: Sequence[FilePiece]
    ) -> Any:
        memory = np.array([(one.address, one.nbytes, 0) for one in pieces], np.uint64)
        places = np.array([(one.offset, one.nbytes, file) for one in pieces], np.uint64)
        return self._agent.initialize_xfer(
            operation,
            self._agent.get_xfer_descs(memory, "DRAM"),
            self._agent.get_xfer_descs(places, "FILE"),
            self._name,
            b"",
            backends=[_BACKEND],
        )


def _make_agent(name: str) -> Any:
    nixl = load_nixl()
    logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend(_BACKEND, {})
    return agent
