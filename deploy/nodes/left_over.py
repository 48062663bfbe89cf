"""The end of workers that nothing supervises any more, by Ray and by the system."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Final

from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.worker_process import ProcessIdentity, WorkerProcess

_ANSWER_SECONDS: Final = 5.0
_END_SECONDS: Final = 10.0


async def end_left_over(namespace: str, workers: Mapping[str, ProcessIdentity | None]) -> None:
    """End these workers' actors for good, and their processes where they can be observed.

    Workers that have ended are left alone.

    Args:
        namespace: Ray's namespace of the actors; empty: they have ended with their controller.
        workers: the workers' latest known processes, by name; None: none is known.
    """
    if not namespace:
        return
    await asyncio.gather(*(_end(namespace, *worker) for worker in workers.items()))


def named_actor(namespace: str | None, name: str) -> Any | None:
    """Return an actor of a cluster; None if there is none of this name. Blocks.

    Args:
        namespace: Ray's namespace of the name; None: this process's.
        name: the actor's name.
    """
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


async def _end(namespace: str, name: str, identity: ProcessIdentity | None) -> None:
    actor = await asyncio.to_thread(named_actor, namespace, name)
    if actor is not None:
        identity = await _identity(actor) or identity
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor)
    process = None if identity is None else WorkerProcess.find(identity)
    if process is not None:
        await process.end(_END_SECONDS)


async def _identity(actor: Any) -> ProcessIdentity | None:
    """Return the identity of the actor's present process; None if it does not answer."""
    identity: ProcessIdentity | None = None
    with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
        async with asyncio.timeout(_ANSWER_SECONDS):
            identity = await actor.process.remote()
    return identity
