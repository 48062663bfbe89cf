"""A file that outlives the process: what its last forward computed, and whether that killed it.

A fatal signal (a segmentation fault, an abort in a library) ends a process without a word.
The next process of the same worker finds here which requests the forward at that moment
computed, and tells their routers, as the dead one would have. SIGKILL leaves no traceback:
it comes from outside, be it an operator, the supervisor or a kernel short of memory, and is
no fault of a request.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.engine.executor.step import Executor, LaunchedStep, PassingExecutor, Step
from kvrelay.wire.output import EndReason, FailureReason, RequestEnd, RequestOutput
from kvrelay.wire.submit import RequestKey

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
_BYTES = 1 << 20
"""Of the record; a batch of 1,000 requests takes a tenth of it."""


class BlackBox:
    """Records the running forward in a file, and reads what the process before left there.

    A record is a line of JSON; while there is none, the file begins with a line feed.

    Args:
        path: the same in every process of one worker; a second file, with `.signal` at its
            end, gets the traceback of a fatal signal.

    Raises:
        OSError: the files cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._traceback_path = path.with_suffix(".signal")
        self._path = path
        self.killed = self._read()
        """The requests whose forward has killed the process before; usually none."""
        path.write_bytes(b"\n]\n".ljust(_BYTES, b"\0"))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._recorded: Sequence[RequestKey] = ()
        """What the file has behind its first byte."""
        self._traceback = self._traceback_path.open("w")
        faulthandler.enable(self._traceback)

    def begin(self, keys: Sequence[RequestKey]) -> None:
        """A forward is about to compute these."""
        if keys != self._recorded:
            # Without room for all, none: nobody is accused by half a record.
            record = json.dumps([list(key) for key in keys]).encode() + b"\n"
            record = record if len(record) <= _BYTES else b"[]\n"
            self._map[1 : len(record)] = record[1:]
            self._recorded = keys
        self._map[:1] = b"["  # last: from here on it counts

    def end(self) -> None:
        """The forward has ended."""
        self._map[:1] = b"\n"

    def close(self) -> None:
        """The worker ends in good order: leave nothing."""
        faulthandler.enable()  # to stderr again
        self._traceback.close()
        self._map.close()
        self._path.unlink(missing_ok=True)
        self._traceback_path.unlink(missing_ok=True)

    def _read(self) -> tuple[RequestKey, ...]:
        if not self._traceback_path.exists() or not self._path.exists():
            return ()
        traceback = self._traceback_path.read_text(errors="replace")
        if not traceback:
            return ()
        logger.error("the process before this one died:\n%s", traceback)
        record, _, _ = self._path.read_bytes().partition(b"\n")
        return tuple(RequestKey(*key) for key in json.loads(record or b"[]"))


def posthumous_ends(keys: Sequence[RequestKey]) -> tuple[RequestOutput, ...]:
    """What the dead process would have said of the requests of its last forward."""
    shared = len(keys) > 1
    cause = FailureReason.FORWARD_FAILED if shared else FailureReason.FORWARD_FAILED_ALONE
    end = RequestEnd(EndReason.FAILED, error="the forward killed its process", cause=cause)
    return tuple(RequestOutput(key, 0, end=end) for key in keys)


class RecordingExecutor(PassingExecutor):
    """An executor that records in a black box what it launches.

    A CPU computes meanwhile. What fails on a device afterwards is told as an error.

    Args:
        executor: computes.
        box: records.
    """

    def __init__(self, executor: Executor, box: BlackBox) -> None:
        super().__init__(executor)
        self._box = box

    def launch(self, step: Step[RequestT]) -> LaunchedStep[RequestT]:
        """Launch one step."""
        computed: Sequence[Any] = [item.request for item in step.scheduled if item.is_live]
        self._box.begin([request.key for request in computed])
        try:
            return super().launch(step)
        finally:
            self._box.end()
