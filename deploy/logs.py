"""A process's log: lines of text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from typing import Any, Final

from kvrelay.options.observing import LogFormat

TEXT: Final = "%(levelname)s %(name)s: %(message)s"
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
"""The characters that could begin another line, or steer a terminal."""
_FIELDS: Final = ("request_id", "attempt", "trace_id", "outcome", "prompt", "output")
"""The fields that a message may have beside its text, given as `extra`."""


class TextFormatter(logging.Formatter):
    """A formatter that writes each message as one line, whatever clients have sent."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the line, with control characters escaped; a traceback follows it."""
        return _CONTROL.sub(lambda found: repr(found[0])[1:-1], super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """A formatter that writes each message as one JSON object.

    An object has time (UTC), level, logger, message and pid, the process's own fields and the
    message's `_FIELDS`. If there was an exception, it has the traceback.

    Args:
        process: the process's own fields.
    """

    def __init__(self, process: dict[str, str]) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, whatever the message contains."""
        said: dict[str, Any] = {
            "time": utc(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **self.process,
        }
        for name in _FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                said[name] = value
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def utc(seconds: float) -> str:
    """Format a moment as RFC 3339 does, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


def level_of(*, debug: bool) -> int:
    """Return the log level of a command, and of the processes that it starts."""
    return logging.INFO if debug else logging.WARNING


def set_up_log(level: int, form: LogFormat, **process: str) -> None:
    """Write the log of this process to standard error, unless it is set up already.

    Args:
        level: the lowest one that is written.
        form: the format of each message.
        process: the process's own fields in each JSON message, such as the worker's name.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray marks workers' lines in files, too
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if form is LogFormat.TEXT else JsonFormatter(process))
    logging.basicConfig(level=level, handlers=[handler])
    if form is LogFormat.JSON:
        logging.captureWarnings(True)


def add_to_log(**process: str) -> None:
    """Add fields of the process to each further message in JSON."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.process.update(process)
