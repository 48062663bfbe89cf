"""The start of a cluster and its router from the options; all parts are put together here."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvrelay.deploy.controller.cluster_thread import ClusterThread
from kvrelay.deploy.controller.operators.operators_listener import OperatorServices
from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.models import ModelFolder
from kvrelay.deploy.nodes.on_node import NODES_ADDRESS
from kvrelay.deploy.nodes.ray_places import PlacementPlan
from kvrelay.deploy.options.serve_options import WORKER_HOST, ServeOptions
from kvrelay.deploy.router_config import router_config
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.engine.config import WorkerConfig, WorkerOptions
from kvrelay.engine.faults import Fault, parse_faults
from kvrelay.options.declaration import values_for
from kvrelay.router.config import PlacementMode
from kvrelay.router.router import Router
from kvrelay.wire.worker_info import WorkerRole


@dataclass(frozen=True, slots=True)
class Deployment:
    """The workers that run, and the router that clients connect to."""

    cluster: ClusterThread
    router: Router


@asynccontextmanager
async def deployed(
    options: ServeOptions,
    model: ModelFolder,
    progress: StartProgress,
    *,
    log_level: int = logging.WARNING,
) -> AsyncIterator[Deployment]:
    """Open a context in which workers and router serve requests; Ray must be initialised.

    When it is left, the router stops first, so that every live request is answered, then the
    workers stop.
    """
    configs = worker_configs(options, model)
    async with AsyncExitStack() as stack:
        with progress.step("workers", f"loading {model.name}") as step:
            cluster = await stack.enter_async_context(
                ClusterThread(
                    configs,
                    plan=PlacementPlan.from_options(options),
                    log_level=log_level,
                    on_progress=lambda progress: step.say(loading_text(progress)),
                )
            )
            step.say(loading_text(dict.fromkeys(cluster.workers, 1.0)))
        with progress.step("router", "connecting to the workers") as step:
            config = router_config(options, model)
            operators = OperatorServices(cluster, cluster.discovery, options.cluster_name)
            router = Router(config, cluster.discovery, operators, [cluster.metrics])
            stack.push_async_callback(router.stop)
            await router.start()
            await router.wait_ready()
            step.say(f"listening on {router.grpc_address}")
        yield Deployment(cluster, router)


def worker_configs(options: ServeOptions, model: ModelFolder) -> list[WorkerConfig]:
    """Return a configuration for each worker, which is named by role and number."""
    device = _device(options)
    host = NODES_ADDRESS if options.joins_ray else WORKER_HOST
    ports = iter([address.port for address in options.worker_metrics()])
    return [
        WorkerConfig(
            name=f"{role}-{number}",
            role=WorkerRole(role),
            model_path=model.path,
            model_name=model.name,
            device=device,
            threads=options.threads_per_worker(),
            computes_prompts=options.placement is PlacementMode.ADAPTIVE,
            draft_model_path=model.draft_path,
            faults=_faults_of(f"{role}-{number}", options),
            host=host,
            metrics_host=WORKER_HOST if options.metrics.is_loopback else host,
            advertised=options.advertised,
            near=options.near,
            suspended_alone=options.joins_ray,
            model_files=model.files,
            draft_model_files=model.draft_files,
            metrics_port=next(ports, 0),
            tls=options.cluster_tls,
        ).with_options(values_for(WorkerOptions, options))
        for role, count in options.roles.items()
        for number in range(count)
    ]


def _faults_of(worker: str, options: ServeOptions) -> tuple[Fault, ...] | None:
    """Return the faults that are meant for this worker; None if the options name none at all."""
    faults = parse_faults(options.debug_faults)
    return tuple(one for one in faults if one.worker in ("", worker)) if faults else None


def _device(options: ServeOptions) -> str:
    asked = options.device
    if options.joins_ray:  # what there is on this machine says nothing of the others
        has_gpu = ray.cluster_resources().get("GPU", 0) > 0
        return ("cuda" if has_gpu else "cpu") if asked == "auto" else asked
    if asked == "auto":
        return "cuda" if _has_cuda() else "cpu"
    if asked == "cuda" and not _has_cuda():
        raise OptionError("--device", "torch finds no CUDA device on this machine")
    return asked


def _has_cuda() -> bool:
    """Whether torch finds a CUDA device. Without a driver torch, which takes seconds, stays out."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


def loading_text(progress: Mapping[str, float]) -> str:
    """Return a line on the start's progress, from the share of its weights each worker has read."""
    started = sum(share == 1 for share in progress.values())
    text = f"{started} of {len(progress)} loaded the model"
    if started == len(progress):
        return text
    return f"{text}, {100 * sum(progress.values()) / len(progress):.0f} % of all weights are read"
