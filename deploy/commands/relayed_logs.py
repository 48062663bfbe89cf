"""The workers' log lines, which Ray brings to the command, as JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvrelay.deploy.logs import utc
from kvrelay.deploy.nodes.local_ray import ray

_RAYS_OWN: Final = "ray_print_logs"
_OURS: Final = "kvrelay_relayed_logs"


@contextlib.contextmanager
def relayed_as_json() -> Iterator[None]:
    """Print lines as they came, instead of Ray's printing, which colours and prefixes them.

    Enter it while Ray is initialised.
    """
    dispatcher = ray._private.ray_logging.global_worker_stdstream_dispatcher
    dispatcher.remove_handler(_RAYS_OWN)
    dispatcher.add_handler(_OURS, _print)
    rays = logging.getLogger("ray")  # it writes text by a handler of its own
    rays.handlers.clear()
    rays.propagate = True
    try:
        yield
    finally:
        dispatcher.remove_handler(_OURS)


def _print(batch: Mapping[str, Any]) -> None:
    """Print the lines of one process; Ray calls this."""
    for line in batch.get("lines", ()):
        sys.stderr.write(as_json(line, batch) + "\n")
    sys.stderr.flush()


def as_json(line: str, batch: Mapping[str, Any]) -> str:
    """Return a worker's line; text that is not JSON, such as a library's warning, becomes JSON."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            json.loads(line)
            return line
    who = {
        name: batch[key]
        for name, key in (("worker", "actor_name"), ("pid", "pid"))
        if batch.get(key)
    }
    said = {"time": utc(time.time()), "level": "INFO", "logger": "stderr", "message": line, **who}
    return json.dumps(said, default=str)
