"""The start and the end of a detached controller, in the Ray that is initialised."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from kvrelay.deploy.bounded_waits import finished
from kvrelay.deploy.controller.changes.role_configs import WorkerConfigs
from kvrelay.deploy.controller.controller_host import ControllerHost, ControllerReport, Stage
from kvrelay.deploy.controller.controller_spec import SPEC, ControllerSpec
from kvrelay.deploy.controller.records.journal import read_records
from kvrelay.deploy.controller.records.key_value_store import KeyValueStore
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.left_over import end_left_over, named_actor
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.model_copy import Checkpoint, offer_for_good
from kvrelay.deploy.nodes.named_groups import find_groups
from kvrelay.deploy.nodes.worker_process import ProcessIdentity, WorkerProcess
from kvrelay.wire.worker_info import WorkerRole

CONTROLLER: Final = "controller"
"""The actor's name, in the cluster's namespace."""
_HEAD: Final = {"node:__internal_head__": 0.001}
"""A resource that only Ray's head node has: if that node is lost, so is the whole Ray cluster."""
_LOOK_SECONDS: Final = 0.1
_END_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 120.0
"""The time that a controller has to end all workers in good order."""


async def bring_up(
    store: KeyValueStore,
    namespace: str,
    spec: ControllerSpec,
    on_report: Callable[[ControllerReport], object] = lambda report: None,
    *,
    host: type[ControllerHost] = ControllerHost,
    checkpoints: Sequence[Checkpoint] = (),
) -> ControllerReport:
    """Start a cluster, as `start_controller` does, and wait until its controller leads.

    If its workers do not start, the cluster is ended, even if another command began it: otherwise
    its name would stay taken. If this call is cancelled, or Ray does not answer, the cluster is
    ended unless it ran before. Raises ClusterError, in one line; StoreError or RayError if Ray does
    not answer.
    """
    starting = asyncio.create_task(
        start_controller(store, namespace, spec, host, checkpoints=checkpoints)
    )
    try:
        await asyncio.shield(starting)
        return await until_leading(namespace, on_report)
    except BaseException as error:
        failed = isinstance(error, ClusterError)
        with contextlib.suppress(asyncio.CancelledError):  # `error` says more
            await finished(_end_begun(starting, store, namespace, failed=failed))
        raise


async def _end_begun(
    starting: asyncio.Task[bool], store: KeyValueStore, namespace: str, *, failed: bool
) -> None:
    """End what `start_controller` has begun, once that has returned; it undoes its own failure.

    A cluster that has failed is ended even if it is not new.
    """
    await asyncio.wait({starting})
    if starting.exception() is None and (starting.result() or failed):
        await end_cluster(store, namespace)


async def start_controller(
    store: KeyValueStore,
    namespace: str,
    spec: ControllerSpec,
    host: type[ControllerHost] = ControllerHost,
    *,
    checkpoints: Sequence[Checkpoint] = (),
) -> bool:
    """Write down a cluster's specification and start its controller; return at once.

    Raises ClusterError if another cluster has the name. After any error nothing is left begun.

    Args:
        store: the cluster's store.
        namespace: Ray's namespace of the cluster's actors.
        spec: the specification of its workers and its controller.
        host: the controller's class.
        checkpoints: the files of this machine that every node can copy.

    Returns:
        whether the cluster is new: False if exactly this one runs already.
    """
    is_new = await _claim_name(store, namespace, spec)
    try:
        if checkpoints:
            await asyncio.to_thread(offer_for_good, namespace, *checkpoints)
        await asyncio.to_thread(_place_controller, namespace, spec, host)
    except BaseException:
        if is_new:
            await end_cluster(store, namespace)
        raise
    return is_new


async def _claim_name(store: KeyValueStore, namespace: str, spec: ControllerSpec) -> bool:
    """Write down the cluster's specification; return True if it is new, False if it runs already.

    Raises ClusterError if another cluster has the name.
    """
    if not await store.put_new(SPEC, spec.to_bytes()):
        there = await store.get(SPEC)
        if there is None or not await _is_as_asked(ControllerSpec.from_bytes(there), spec, store):
            raise ClusterError(
                f"--cluster-name: {spec.cluster_name} runs in this Ray already, with other "
                "options: `kvrelay roll` changes those of its workers, and `kvrelay down` ends it"
            )
        return False
    try:
        if await asyncio.to_thread(_has_workers, namespace):
            raise ClusterError(f"--cluster-name: {spec.cluster_name} runs in this Ray already")
    except BaseException:
        await store.delete(SPEC)
        raise
    return True


def _place_controller(namespace: str, spec: ControllerSpec, host: type[ControllerHost]) -> None:
    """Make the controller's actor, if there is none. Blocks."""
    ray.remote(host).options(
        name=CONTROLLER,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=-1,  # every method may be called twice
        num_cpus=0,
        resources=_HEAD,
    ).remote(namespace, spec.log_level, spec.configs[0].log_format)


async def until_leading(
    namespace: str, on_report: Callable[[ControllerReport], object] = lambda report: None
) -> ControllerReport:
    """Wait until a controller leads, in its present process or a later one.

    Raises ClusterError, in one line, if its workers do not start.
    """
    controller = await asyncio.to_thread(named_actor, namespace, CONTROLLER)
    if controller is None:
        raise ClusterError("the controller is gone")
    while True:
        report: ControllerReport = await controller.report.remote()
        on_report(report)
        match report.stage:
            case Stage.LEADING:
                return report
            case Stage.FAILED:
                raise ClusterError(report.reason)
            case Stage.STOPPED:
                raise ClusterError("the cluster was stopped")
        await asyncio.sleep(_LOOK_SECONDS)


async def end_cluster(store: KeyValueStore, namespace: str) -> bool:
    """End a cluster's workers, controller, places and keys, and nothing else.

    What a lost controller has left is ended, too, but nothing of a `kvrelay serve`. Returns when
    the processes that can be observed from here have ended; False if there is no cluster.
    """
    controller = await asyncio.to_thread(named_actor, namespace, CONTROLLER)
    if controller is None and await store.get(SPEC) is None:
        left = await asyncio.to_thread(_names_of_detached_actors, namespace)
        if not left and not await store.keys(""):
            return False
    process = None
    if controller is not None:
        process = await _stop(controller)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(controller)
    if process is not None:
        await process.end(_END_SECONDS)
    left = await asyncio.to_thread(_names_of_detached_actors, namespace)
    await end_left_over(namespace, {name: None for name in left if name != CONTROLLER})
    groups = await asyncio.to_thread(find_groups, namespace)
    for group in groups.values():
        ray.util.remove_placement_group(group)
    for key in sorted(await store.keys(""), key=SPEC.__eq__):  # that last: it says what is left
        await store.delete(key)
    return True


async def _is_as_asked(there: ControllerSpec, asked: ControllerSpec, store: KeyValueStore) -> bool:
    """Return whether a cluster was started with this specification, or has got it by a roll."""
    if there == asked:
        return True
    records = await read_records(store)
    if records is None:
        return False
    configs, revision = WorkerConfigs(there.configs), records.cluster.revision
    rolled = tuple(configs.of(one.name, one.role, revision) for one in there.configs)
    return replace(there, configs=rolled) == asked


def _has_workers(namespace: str) -> bool:
    """Whether `kvrelay serve` has a cluster of this name in this Ray."""
    roles = set(WorkerRole)
    return any(name.rpartition("-")[0] in roles for name in _names_of_actors(namespace))


def _names_of_detached_actors(namespace: str) -> list[str]:
    """Return the names of the actors that outlive their command, so none of `kvrelay serve`."""
    return [name for name in _names_of_actors(namespace) if _is_detached(namespace, name)]


def _is_detached(namespace: str, name: str) -> bool:
    actor = named_actor(namespace, name)
    if actor is None:  # it has ended just now
        return False
    table = ray._private.state.actors(actor._actor_id.hex())
    return bool(table.get("IsDetached", False))


def _names_of_actors(namespace: str) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in named if one["namespace"] == namespace]


async def _stop(controller: Any) -> WorkerProcess | None:
    """Let a controller end its workers in good order; return its process.

    None: it does not answer, or its process cannot be observed from here.
    """
    process = None
    with contextlib.suppress(TimeoutError, ray.exceptions.RayError):
        async with asyncio.timeout(_STOP_SECONDS):
            while True:
                await controller.stop.remote()  # again: its next process knows of nothing
                report: ControllerReport = await controller.report.remote()
                if report.stage in (Stage.STOPPED, Stage.FAILED):
                    break
                await asyncio.sleep(_LOOK_SECONDS)
            identity: ProcessIdentity | None = await controller.process.remote()
            process = None if identity is None else WorkerProcess.find(identity)
    return process
