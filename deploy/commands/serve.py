"""`kvrelay serve`: a cluster that runs until it is told to stop, or detached from the command."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.commands.options_file import with_config_file
from kvrelay.deploy.commands.serve_text import headline, ready_lines
from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.logs import level_of
from kvrelay.deploy.nodes.models import ModelFolder, finding_model
from kvrelay.deploy.options.environment import allow_many_machines, set_process_variables
from kvrelay.deploy.options.listen_address import DEFAULT_HTTP, Address
from kvrelay.deploy.options.option_flags import SectionedCommand, declared_options
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.deploy.stop_signals import StopSignals, starting
from kvrelay.options.declaration import flag_of
from kvrelay.options.observing import LogFormat

if TYPE_CHECKING:
    from kvrelay.deploy.nodes.joined_ray import JoinedRay
    from kvrelay.deploy.nodes.local_ray import LocalRay
    from kvrelay.router.router import Router


_WORKERS_IMPORT: Final = ("kvrelay.model_runner.runner",)
"""Modules that take a worker seconds to import, torch among them, and read none of its settings.

NIXL is not: UCX reads its settings when that is imported. Ray sets OMP_NUM_THREADS for them too
late, but a worker tells torch its threads before it computes.
"""


@click.command(cls=SectionedCommand, context_settings={"show_default": True})
@with_config_file
@click.option(
    "--detach",
    is_flag=True,
    help="Do as `kvrelay up` does: return when the workers are ready, and let them run on, with "
    "their controller, in the Ray of --ray-address. Routers are started by `kvrelay router`.",
)
@declared_options(ServeOptions)
@with_clear_errors
def serve(*, detach: bool, debug: bool, **options: Any) -> None:
    """Serve a model from this machine, or from a Ray cluster.

    The command starts a Ray of its own, or joins one with --ray-address. It starts prefill and
    decode workers (or aggregated workers) and a router, and prints their addresses when they are
    ready. Ctrl-C stops them, and nothing else that runs here; SIGTERM lets requests end before, for
    --drain-seconds at most. A second signal does not wait.
    """
    if detach:
        _up(options, debug=debug)
    else:
        run(ServeOptions(**options), StartProgress(sys.stdout), debug=debug)


def _up(options: Mapping[str, Any], *, debug: bool) -> None:
    """Do the work of `kvrelay up`. Raises OptionError for an option that only a router has."""
    from kvrelay.deploy.commands import up
    from kvrelay.deploy.options.up_options import UP_OPTIONS, UpOptions

    given = click.get_current_context().get_parameter_source
    for name in sorted(options.keys() - UP_OPTIONS):
        if given(name) is not ParameterSource.DEFAULT:
            raise OptionError(
                flag_of(name), "is for a router, and --detach starts none: see kvrelay router"
            )
    workers = {name: value for name, value in options.items() if name in UP_OPTIONS}
    up.run(UpOptions(**workers), StartProgress(sys.stdout), debug=debug)


def run(options: ServeOptions, progress: StartProgress, *, debug: bool) -> None:
    """Serve until SIGINT or SIGTERM, and leave nothing running.

    Returns if the cluster was ready when the signal came; otherwise exits with 128 + the
    signal's number.
    """
    with starting(progress) as signals:
        options.check_files()
        options.grpc.check_free("--grpc")
        options = with_free_http(options, progress)
        options.admin.check_free("--admin")
        workers = () if options.joins_ray else options.worker_metrics()
        for address in (options.metrics, *workers):
            address.check_free("--metrics")
        progress.line(headline(options))
        # Before there is a thread: another one may read the variables while they change.
        if options.joins_ray:
            allow_many_machines()
        set_process_variables()
        with finding_model(options, progress) as found:
            _run_cluster(options, found, progress, signals, debug=debug)
    progress.line("Stopped.")


async def drain_at_sigterm(router: Router, progress: StartProgress, signals: StopSignals) -> None:
    """Let the router drain if SIGTERM asks for the stop; who presses Ctrl-C waits for nobody."""
    if signals.received is signal.SIGTERM:
        progress.line("Draining the router: a second signal does not wait.")
        await router.drain()


def with_free_http(options: ServeOptions, progress: StartProgress) -> ServeOptions:
    """Return the options, with any free port for HTTP if another program has the default one."""
    if options.http != DEFAULT_HTTP:
        options.http.check_free("--http")
    elif DEFAULT_HTTP.in_the_way() is not None:
        progress.line(f"{DEFAULT_HTTP} is in use: HTTP gets another port (--http chooses one).")
        return replace(options, http=Address(DEFAULT_HTTP.host, 0))
    return options


def _run_cluster(
    options: ServeOptions,
    found: Future[ModelFolder],
    progress: StartProgress,
    signals: StopSignals,
    *,
    debug: bool,
) -> None:
    """Start Ray beside the search for the model, then all else; end all of it on the way out."""
    with ExitStack() as stack:
        doing = f"joining {options.ray_address}" if options.joins_ray else "starting a local one"
        with progress.step("ray", doing) as step:
            ray = stack.enter_context(_ray(options, debug=debug))
            if options.log_format is LogFormat.JSON:
                stack.enter_context(_relayed_as_json())
            signals.install()
            step.say(f"logs in {ray.logs}")
        if found.exception() is None:
            model = found.result()
            if options.copy_model:
                from kvrelay.deploy.nodes.model_copy import checkpoints_of, offering, with_digests
                from kvrelay.deploy.nodes.ray_places import check_name_is_free

                check_name_is_free()
                model = with_digests(model, progress)
                stack.enter_context(offering(*checkpoints_of(model)))
            died = asyncio.run(_serve(options, model, progress, signals, debug=debug))
            if died:
                ray.keep_logs()
                progress.line(f"The logs of workers that died stay in {ray.logs}.")
        progress.line("Leaving Ray." if options.joins_ray else "Stopping Ray.")
    found.result()  # raises what is wrong with the model: Ray's logs say nothing of it


def _ray(options: ServeOptions, *, debug: bool) -> AbstractContextManager[LocalRay | JoinedRay]:
    """Return the Ray that workers are to run in, not entered yet.

    Ray is imported here, so that options are checked before the seconds which that takes.
    """
    if options.ray_address is not None:
        from kvrelay.deploy.nodes.joined_ray import JoinedRay, namespace_of

        return JoinedRay(options.ray_address, namespace_of(options.cluster_name))
    from kvrelay.deploy.nodes.local_ray import LocalRay

    # Ray begins a process a CPU, and each of them imports.
    preload = _WORKERS_IMPORT if options.worker_cpus == 1 else ()
    cpus = options.workers * options.worker_cpus
    return LocalRay(cpus, keep_logs=debug, preload=preload)


def _relayed_as_json() -> AbstractContextManager[None]:
    from kvrelay.deploy.commands.relayed_logs import relayed_as_json

    return relayed_as_json()


async def _serve(
    options: ServeOptions,
    model: ModelFolder,
    progress: StartProgress,
    signals: StopSignals,
    *,
    debug: bool,
) -> bool:
    """Serve until a signal; return whether a worker has died meanwhile."""
    from kvrelay.deploy.deployment import deployed

    stopped = asyncio.Event()
    log_level = level_of(debug=debug)
    with signals.cancelling_this_task():
        async with deployed(options, model, progress, log_level=log_level) as deployment:
            signals.deliver_to_loop(stopped.set)
            progress.line(f"Ready in {progress.elapsed:.1f} s.")
            for line in ready_lines(deployment, model, options):
                progress.line(line)
            await stopped.wait()
            await drain_at_sigterm(deployment.router, progress, signals)
            state = await deployment.cluster.state()
            progress.line("Stopping the router and the workers.")
    return any(worker.last_end for worker in state.workers)
