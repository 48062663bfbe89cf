"""`kvrelay serve`: a cluster that runs until it is told to stop, or detached from the command."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.commands.options_file import load_defaults
from kvrelay.deploy.commands.serve_text import headline, ready_lines
from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.logs import level_of
from kvrelay.deploy.nodes.converted import ConvertedModels
from kvrelay.deploy.nodes.models import ModelFolder, resolve_model, users_models
from kvrelay.deploy.options.environment import allow_many_machines
from kvrelay.deploy.options.listen_address import DEFAULT_HTTP, Address
from kvrelay.deploy.options.option_flags import SectionedCommand, declared_options
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.deploy.stop_signals import StopSignals
from kvrelay.options.declaration import flag_of
from kvrelay.options.observing import LogFormat

if TYPE_CHECKING:
    from kvrelay.deploy.nodes.joined_ray import JoinedRay
    from kvrelay.deploy.nodes.local_ray import LocalRay


@click.command(cls=SectionedCommand, context_settings={"show_default": True})
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=load_defaults,
    help="A TOML file with these options by name; an option on the command line wins.",
)
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
    ready. Ctrl-C stops them, and nothing else that runs here; a second Ctrl-C does not wait.
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
    with StopSignals() as signals:
        try:
            options.check_files()
            options.grpc.check_free("--grpc")
            options = with_free_http(options, progress)
            options.admin.check_free("--admin")
            workers = () if options.joins_ray else options.worker_metrics()
            for address in (options.metrics, *workers):
                address.check_free("--metrics")
            progress.line(headline(options))
            model = find_model(options, progress)
            _run_cluster(options, model, progress, signals, debug=debug)
        except (KeyboardInterrupt, asyncio.CancelledError):
            progress.line("Stopped before it was ready.")
            sys.exit(128 + (signals.received or signal.SIGINT))
    progress.line("Stopped.")


def with_free_http(options: ServeOptions, progress: StartProgress) -> ServeOptions:
    """Return the options, with any free port for HTTP if another program has the default one."""
    if options.http != DEFAULT_HTTP:
        options.http.check_free("--http")
    elif DEFAULT_HTTP.in_the_way() is not None:
        progress.line(f"{DEFAULT_HTTP} is in use: HTTP gets another port (--http chooses one).")
        return replace(options, http=Address(DEFAULT_HTTP.host, 0))
    return options


def find_model(options: ServeOptions, progress: StartProgress) -> ModelFolder:
    """Find the checkpoints that the options name; convert them if need be."""
    converted = users_models()
    with progress.step("model", options.model) as step:
        model = resolve_model(options.model, options.dtype, converted, step.say)
        step.say(model.name)
    return replace(
        model,
        name=options.model_name or model.name,
        draft_path=_find_draft(options, progress, converted),
    )


def _find_draft(
    options: ServeOptions, progress: StartProgress, converted: ConvertedModels
) -> Path | None:
    if options.draft_model is None:
        return None
    with progress.step("draft model", options.draft_model) as step:
        model = resolve_model(
            options.draft_model, options.dtype, converted, step.say, option="--draft-model"
        )
        step.say(model.name)
    return model.path


def _run_cluster(
    options: ServeOptions,
    model: ModelFolder,
    progress: StartProgress,
    signals: StopSignals,
    *,
    debug: bool,
) -> None:
    """Start Ray, then the workers and the router; end all of them on the way out."""
    with ExitStack() as stack:
        doing = f"joining {options.ray_address}" if options.joins_ray else "starting a local one"
        with progress.step("ray", doing) as step:
            ray = stack.enter_context(_ray(options, debug=debug))
            if options.log_format is LogFormat.JSON:
                stack.enter_context(_relayed_as_json())
            signals.install()
            step.say(f"logs in {ray.logs}")
        if options.copy_model:
            model = _offered(model, progress, stack)
        asyncio.run(_serve(options, model, progress, signals, debug=debug))
        progress.line("Leaving Ray." if options.joins_ray else "Stopping Ray.")


def _ray(options: ServeOptions, *, debug: bool) -> AbstractContextManager[LocalRay | JoinedRay]:
    """Return the Ray that workers are to run in, not entered yet.

    Ray is imported here, so that options are checked before the seconds which that takes.
    """
    if options.ray_address is not None:
        allow_many_machines()
        from kvrelay.deploy.nodes.joined_ray import JoinedRay, namespace_of

        return JoinedRay(options.ray_address, namespace_of(options.cluster_name))
    from kvrelay.deploy.nodes.local_ray import LocalRay

    return LocalRay(options.workers * options.worker_cpus, keep_logs=debug)


def _relayed_as_json() -> AbstractContextManager[None]:
    from kvrelay.deploy.commands.relayed_logs import relayed_as_json

    return relayed_as_json()


def _offered(model: ModelFolder, progress: StartProgress, stack: ExitStack) -> ModelFolder:
    """Offer the model's files to the workers' nodes; return the model with their digests."""
    from kvrelay.deploy.nodes.model_copy import files_of, offering
    from kvrelay.deploy.nodes.ray_places import check_name_is_free

    check_name_is_free()
    with progress.step("model", f"{model.name}: reading its digests") as step:
        files = files_of(model.path)
        drafts = {} if model.draft_path is None else files_of(model.draft_path)
        checkpoints = [(model.path, files)]
        if model.draft_path is not None:
            checkpoints.append((model.draft_path, drafts))
        stack.enter_context(offering(*checkpoints))
        step.say("nodes that lack it get a copy")
    return replace(model, files=files, draft_files=drafts)


async def _serve(
    options: ServeOptions,
    model: ModelFolder,
    progress: StartProgress,
    signals: StopSignals,
    *,
    debug: bool,
) -> None:
    from kvrelay.deploy.deployment import deployed

    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    signals.deliver_to(lambda: loop.call_soon_threadsafe(task.cancel))
    log_level = level_of(debug=debug)
    try:
        async with deployed(options, model, progress, log_level=log_level) as deployment:
            signals.deliver_to(lambda: loop.call_soon_threadsafe(stopped.set))
            progress.line(f"Ready in {progress.elapsed:.1f} s.")
            for line in ready_lines(deployment, model, options):
                progress.line(line)
            await stopped.wait()
            progress.line("Stopping the router and the workers.")
    finally:
        signals.stopping()  # the loop that signals were delivered to ends here
