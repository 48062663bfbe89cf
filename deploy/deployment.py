"""The composition root: options in, a running cluster with its router out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch

from kvrelay.deploy.cluster import Cluster
from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.models import Model
from kvrelay.deploy.options import WORKER_HOST, ServeOptions
from kvrelay.deploy.progress import Progress
from kvrelay.engine.config import PrefixIndexKind, Role, Speculation, WorkerConfig, WorkerInfo
from kvrelay.engine.faults import Fault, parse_faults
from kvrelay.kv_transfer.checksums import VerifyPages
from kvrelay.mem_cache.geometry import PageOrder
from kvrelay.router.config import RouterConfig
from kvrelay.router.router import Router


@dataclass(frozen=True, slots=True)
class Deployment:
    """What runs: the workers and the router before them."""

    cluster: Cluster
    router: Router


@asynccontextmanager
async def deployed(
    options: ServeOptions,
    model: Model,
    progress: Progress,
    *,
    log_level: int = logging.WARNING,
) -> AsyncIterator[Deployment]:
    """Run workers and router, ready for requests, in the Ray that is initialised.

    Leaving the context stops the router first, so that every live request gets
    its end, then the workers.
    """
    configs = worker_configs(options, model)
    async with AsyncExitStack() as stack:
        with progress.step("workers", f"loading {model.name}") as step:
            on_start = _count(len(configs), step.say)
            cluster = await stack.enter_async_context(
                Cluster(
                    configs,
                    log_level=log_level,
                    worker_timeout=options.worker_timeout,
                    on_start=on_start,
                )
            )
        with progress.step("router", "connecting to the workers") as step:
            router = Router(router_config(options, model), cluster.discovery, cluster)
            stack.push_async_callback(router.stop)
            await router.start()
            await router.wait_ready()
            step.say(f"listening on {router.grpc_address}")
        yield Deployment(cluster, router)


def worker_configs(options: ServeOptions, model: Model) -> list[WorkerConfig]:
    """One configuration a worker, named by role and number."""
    device = _device(options.device)
    ports = iter([address.port for address in options.worker_metrics()])
    return [
        WorkerConfig(
            name=f"{role}-{number}",
            role=Role(role),
            model_path=model.path,
            model_name=model.name,
            dtype=options.dtype,
            device=device,
            page_size=options.page_size,
            kv_memory=options.kv_memory,
            page_order=PageOrder(options.page_order),
            prefix_index=PrefixIndexKind(options.prefix_index),
            max_running=options.max_running,
            chunk_tokens=options.chunk_tokens,
            max_model_len=options.max_model_len,
            overlap=options.overlap,
            growth_min=options.growth_min,
            growth_max=options.growth_max,
            bypass_limit=options.bypass_limit,
            speculation=Speculation(options.speculation),
            draft_model_path=model.draft_path,
            num_draft_tokens=options.num_draft_tokens,
            debug_retract_every=options.debug_retract_every,
            threads=options.threads_per_worker(),
            drain_grace=options.drain_grace,
            quarantine_limit=options.quarantine_limit,
            peer_timeout=options.worker_timeout,
            faults=_faults_of(f"{role}-{number}", options),
            audit_pages=options.audit_pages,
            verify_pages=VerifyPages(options.verify_pages),
            min_transfer_gbps=options.min_transfer_gbps,
            host=WORKER_HOST,
            metrics_port=next(ports, 0),
            tls=options.cluster_tls,
        )
        for role, count in options.roles.items()
        for number in range(count)
    ]


def router_config(options: ServeOptions, model: Model) -> RouterConfig:
    """The router's part of the options."""
    return RouterConfig(
        model_name=model.name,
        model_path=model.path,
        dtype=options.dtype,
        grpc_address=str(options.grpc),
        metrics_address=str(options.metrics),
        default_max_tokens=options.default_max_tokens,
        max_live_requests=options.max_live_requests,
        worker_tls=options.cluster_tls,
        front_tls=options.front_tls,
        auth_token_file=options.auth_token_file,
        strict=options.strict,
    )


def _faults_of(worker: str, options: ServeOptions) -> tuple[Fault, ...] | None:
    """Those that are for this worker; None if there are none at all."""
    faults = parse_faults(options.debug_faults)
    return tuple(one for one in faults if one.worker in ("", worker)) if faults else None


def _device(asked: str) -> str:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device", "torch finds no CUDA device on this machine")
    return asked


def _count(total: int, say: Callable[[str], None]) -> Callable[[WorkerInfo], None]:
    """Say how many of `total` workers are up, as they come up."""
    started: list[str] = []

    def on_start(info: WorkerInfo) -> None:
        started.append(info.name)
        say(f"{len(started)} of {total} loaded the model")

    return on_start
