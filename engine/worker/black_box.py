"""A file that outlives the process: the requests of its last forward, and whether that killed it.

A fatal signal (a segmentation fault, an abort in a library) ends a process without a word. The next
process of the same worker finds here which requests the forward computed at that moment. It tells
their routers, as the dead process would have.

SIGKILL leaves no traceback. It comes from outside (an operator, the supervisor or a kernel short of
memory) and is not a request's fault.
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
"""The size of the record; a batch of 1,000 requests takes a tenth of it."""


class BlackBox:
    """The record of the running forward in a file, and of the one that the previous process left.

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
        """The requests whose forward killed the previous process; usually none."""
        path.write_bytes(b"\n]\n".ljust(_BYTES, b"\0"))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._recorded: Sequence[RequestKey] = ()
        """The requests that the file has behind its first byte."""
        self._traceback = self._traceback_path.open("w")
        faulthandler.enable(self._traceback)

    def begin(self, keys: Sequence[RequestKey]) -> None:
        """Record that a forward is about to compute these requests."""
        if keys != self._recorded:
            # If they do not all fit, record none: half a record would accuse the wrong ones.
            record = json.dumps([list(key) for key in keys]).encode() + b"\n"
            record = record if len(record) <= _BYTES else b"[]\n"
            self._map[1 : len(record)] = record[1:]
            self._recorded = keys
        self._map[:1] = b"["  # last: from here on it counts

    def end(self) -> None:
        """Record that the forward has ended."""
        self._map[:1] = b"\n"

    def close(self) -> None:
        """Remove the files, because the worker ends in good order."""
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
    """Make the ends that the dead process would have sent for the requests of its last forward."""
    shared = len(keys) > 1
    cause = FailureReason.FORWARD_FAILED if shared else FailureReason.FORWARD_FAILED_ALONE
    end = RequestEnd(EndReason.FAILED, error="the forward killed its process", cause=cause)
    return tuple(RequestOutput(key, 0, end=end) for key in keys)


class RecordingExecutor(PassingExecutor):
    """An executor that records in a black box what it launches.

    A CPU computes during the launch. A GPU's later failures are reported as errors.

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
