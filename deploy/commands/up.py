"""`kvrelay up`: a cluster that starts in an existing Ray and runs on by itself."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.commands.options_file import with_config_file
from kvrelay.deploy.commands.serve_text import headline
from kvrelay.deploy.logs import level_of
from kvrelay.deploy.nodes.models import ModelFolder, find_model
from kvrelay.deploy.options.environment import allow_many_machines
from kvrelay.deploy.options.option_flags import SectionedCommand, declared_options
from kvrelay.deploy.options.up_options import UP_OPTIONS, UpOptions
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.deploy.stop_signals import StopSignals, starting

if TYPE_CHECKING:
    from kvrelay.deploy.controller.controller_host import ControllerReport
    from kvrelay.deploy.controller.controller_spec import ControllerSpec
    from kvrelay.deploy.nodes.model_copy import Checkpoint


@click.command(cls=SectionedCommand, context_settings={"show_default": True})
@with_config_file
@declared_options(UpOptions, UP_OPTIONS)
@with_clear_errors
def up(*, debug: bool, **options: Any) -> None:
    """Start workers and their controller in a Ray cluster, where they run on.

    The command ends when all workers are ready; run it on a node of the Ray cluster. Routers are
    started by `kvrelay router`, and `kvrelay down` ends workers and controller. Called again with
    the same options, it waits until the cluster is ready. Ctrl-C ends what it has begun.
    """
    run(UpOptions(**options), StartProgress(sys.stdout), debug=debug)


def run(options: UpOptions, progress: StartProgress, *, debug: bool) -> None:
    """Start the cluster; a signal before it is ready ends it again, if this call has begun it."""
    allow_many_machines()
    with starting(progress) as signals:
        options.check_files()
        progress.line(headline(options))
        model = find_model(options, progress)
        _start(options, model, progress, signals, debug=debug)


def _start(
    options: UpOptions,
    model: ModelFolder,
    progress: StartProgress,
    signals: StopSignals,
    *,
    debug: bool,
) -> None:
    from kvrelay.deploy.nodes.joined_ray import JoinedRay, namespace_of
    from kvrelay.deploy.nodes.model_copy import checkpoints_of, with_digests

    assert options.ray_address is not None
    namespace = namespace_of(options.cluster_name)
    with ExitStack() as stack:
        with progress.step("ray", f"joining {options.ray_address}") as step:
            ray = stack.enter_context(JoinedRay(options.ray_address, namespace))
            signals.install()
            step.say(f"logs in {ray.logs}")
        checkpoints: tuple[Checkpoint, ...] = ()
        if options.copy_model:
            model = with_digests(model, progress)
            checkpoints = checkpoints_of(model)
        spec = make_spec(options, model, namespace, debug=debug)
        asyncio.run(_up(spec, checkpoints, namespace, progress, signals))


def make_spec(
    options: UpOptions, model: ModelFolder, namespace: str, *, debug: bool = False
) -> ControllerSpec:
    """Make the controller's specification; Ray must be initialised."""
    from kvrelay.deploy.controller.controller_spec import ControllerSpec
    from kvrelay.deploy.deployment import worker_configs
    from kvrelay.deploy.nodes.on_node import NODES_ADDRESS
    from kvrelay.deploy.nodes.ray_places import PlacementPlan

    token_file = options.auth_token_file
    front = options.front_tls
    return ControllerSpec(
        cluster_name=options.cluster_name,
        configs=tuple(worker_configs(options, model)),
        plan=replace(PlacementPlan.from_options(options), namespace=namespace),
        log_level=level_of(debug=debug),
        port=options.controller_port,
        advertised=options.advertised,
        tls=front and replace(front, cert=front.cert.absolute(), key=front.key.absolute()),
        auth_token_file=token_file and token_file.absolute(),
        metrics_host=options.metrics.host if options.metrics.is_loopback else NODES_ADDRESS,
        metrics_port=options.metrics.port,
    )


async def _up(
    spec: ControllerSpec,
    checkpoints: tuple[Checkpoint, ...],
    namespace: str,
    progress: StartProgress,
    signals: StopSignals,
) -> None:
    from kvrelay.deploy.controller.detached import bring_up
    from kvrelay.deploy.controller.records.ray_store import RayStore
    from kvrelay.deploy.deployment import loading_text

    store = RayStore.of_this_process(namespace)
    with (
        signals.cancelling_this_task(),
        progress.step("workers", "loading the model") as step,
    ):

        def show(report: ControllerReport) -> None:
            if report.progress:
                step.say(loading_text(report.progress))

        report = await bring_up(store, namespace, spec, show, checkpoints=checkpoints)
        step.say("ready")
    progress.line(f"Ready in {progress.elapsed:.1f} s.")
    progress.line(f"  controller {report.address}")
    progress.line(f"  metrics    http://{report.metrics_address}/metrics")
    progress.line(f"`kvrelay router --controller {report.address}` runs a router for it, and")
    progress.line(f"`kvrelay down --ray-address ... --cluster-name {spec.cluster_name}` ends it.")
