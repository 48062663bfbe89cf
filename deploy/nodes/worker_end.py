"""The cause of the end of a worker's process, as far as its controller knows it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from ray.core.generated import gcs_pb2

from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.mem_cache.errors import ConservationError

_OUT_OF_MEMORY: Final = 4  # NODE_OUT_OF_MEMORY of WorkerExitType in ray's common.proto


class WorkerEnd(StrEnum):
    """The causes; each value is a label of metrics."""

    DRAINED = "drained"
    """The worker had drained."""
    CONSERVATION = "conservation"
    """The worker found its account of memory wrong: pages were lost, or had two owners."""
    ENGINE_FAILED = "engine_failed"
    """The worker's engine, its transfer agent or its forward passes failed."""
    SILENT = "silent"
    """The worker did not answer for too long, so it was killed."""
    LOST = "lost"
    """The process ended, or was unreachable until its lease was over; the cause is not known."""

    @classmethod
    def of_failure(cls, reason: str) -> WorkerEnd:
        """Return the cause behind the text of `Worker.failed`, which begins with the error."""
        error, _, _ = reason.partition(":")
        return cls.CONSERVATION if error == ConservationError.__name__ else cls.ENGINE_FAILED


def ended_by_memory_monitor(node: str, pid: int) -> str:
    """Return why Ray's memory monitor has ended a process, in one line; empty: it has not.

    It asks Ray and may block. Ray tells nobody who waits for the process: to them it only died.

    Args:
        node: the address of the process's node.
        pid: the process id there. Of processes with the same id the latest counts.
    """
    accessor = ray._private.state.state._connect_and_get_accessor()
    told = map(gcs_pb2.WorkerTableData.FromString, accessor.get_worker_table())
    ends = [
        one
        for one in told
        if not one.is_alive and one.pid == pid and one.worker_address.ip_address == node
    ]
    latest = max(ends, key=lambda one: one.end_time_ms, default=None)
    if latest is None or latest.exit_type != _OUT_OF_MEMORY:
        return ""
    return reason_in(latest.exit_detail)


def reason_in(detail: str) -> str:
    """Return the reason in Ray's detail of an end, which has dozens of lines."""
    lines = [line.strip() for line in detail.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("OOM kill reason: ")), "")
    used = lines[0].rpartition("low on memory. ")[2] if lines else ""
    said = "; ".join(one for one in (used, why.removeprefix("OOM kill reason: ")) if one)
    return (
        f"Ray's memory monitor ended it, as its node ran low on memory: {said} "
        "(RAY_memory_usage_threshold; --kv-memory and --host-kv-memory make workers smaller)"
    )
