"""`kvrelay router`: one more router for the workers of a running cluster."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import fields
from typing import Any, Final

import click
import grpc

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.commands.serve import drain_at_sigterm, with_free_http
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.nodes.models import ModelFolder, find_model
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.option_flags import SectionedCommand, declared_options
from kvrelay.deploy.options.serve_options import RouterProcessOptions, ServeOptions
from kvrelay.deploy.reach.find_controller import Controller, with_controller
from kvrelay.deploy.reach.grpc_target import CommandAccess, with_access
from kvrelay.deploy.router_config import router_config
from kvrelay.deploy.start_progress import StartProgress
from kvrelay.deploy.stop_signals import StopSignals, starting
from kvrelay.net.channel_options import channel_options
from kvrelay.router.config import RouterOptions
from kvrelay.router.remote_discovery import RemoteDiscovery
from kvrelay.router.router import Router
from kvrelay.router.shifting_discovery import ShiftingDiscovery

_OPTIONS: Final = {field.name for field in fields(RouterOptions)} | {
    *("model", "model_name", "dtype", "itl_target", "ttft_target"),
    *("grpc", "http", "metrics", "insecure"),
    *("tls_cert", "tls_key", "tls_ca", "tls_name", "front_tls_cert", "front_tls_key"),
}
"""The options of `kvrelay serve` that a router has as well."""


@click.command(cls=SectionedCommand, context_settings={"show_default": True})
@with_controller
@declared_options(ServeOptions, _OPTIONS)
@with_clear_errors
@with_access
def router(*, debug: bool, controller: Controller, access: CommandAccess, **options: Any) -> None:
    """Route requests to the workers of a cluster that runs.

    Routers share nothing: any number may run, and each serves all of the cluster's workers. While
    the controller is away they go on with the workers that they know. Give --model, --dtype and the
    other options as to `kvrelay serve`. The --token-file, --ca and --tls are those with which this
    router calls the controller; the token needs the right admin. Ctrl-C stops this router alone;
    SIGTERM lets its requests end before, for --drain-seconds at most.
    """
    if controller.address is not None:
        access.check(controller.address)
    run(RouterProcessOptions(**options), controller, access, StartProgress(sys.stdout))


def run(
    options: ServeOptions, controller: Controller, access: CommandAccess, progress: StartProgress
) -> None:
    """Route until SIGINT or SIGTERM.

    Returns if the router was ready when the signal came; otherwise exits with 128 + the signal's
    number.
    """
    with starting(progress) as signals:
        options.check_files()
        options.grpc.check_free("--grpc")
        options = with_free_http(options, progress)
        options.metrics.check_free("--metrics")
        model = find_model(options, progress)
        asyncio.run(_route(options, model, _discovery(controller, access), progress, signals))
    progress.line("Stopped.")


def _discovery(controller: Controller, access: CommandAccess) -> ShiftingDiscovery:
    """Make a discovery that follows a controller, and the successors that it names."""

    def follow(address: str) -> RemoteDiscovery:
        return _followed(Controller(Address.parse(address)), access)

    return ShiftingDiscovery(_followed(controller, access), follow)


def _followed(controller: Controller, access: CommandAccess) -> RemoteDiscovery:
    credentials, options = access.credentials(), channel_options()

    async def find() -> str:
        try:
            address = await asyncio.to_thread(controller.find)
            access.check(address)
        except DeployError as error:
            raise OSError(str(error)) from error
        return str(address)

    def open_channel(address: str) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, options)

    return RemoteDiscovery(find, open_channel, access.metadata)


async def _route(
    options: ServeOptions,
    model: ModelFolder,
    discovery: ShiftingDiscovery,
    progress: StartProgress,
    signals: StopSignals,
) -> None:
    stopped = asyncio.Event()
    with signals.cancelling_this_task():
        async with AsyncExitStack() as stack:
            with progress.step("router", "starting") as step:
                router = Router(router_config(options, model), discovery)
                stack.push_async_callback(router.stop)
                await router.start()
                step.say(f"listening on {router.grpc_address}")
            discovery.metrics_address = router.metrics_address
            with progress.step("controller", "asking for the workers") as step:
                await stack.enter_async_context(discovery.following())
                step.say(f"{len(discovery.endpoints())} workers")
            with progress.step("workers", "connecting to them") as step:
                await router.wait_ready()
                step.say("connected")
            signals.deliver_to_loop(stopped.set)
            progress.line(f"Ready in {progress.elapsed:.1f} s.")
            progress.line(f"  gRPC       {router.grpc_address}")
            progress.line(f"  HTTP       http://{router.http_address}/v1")
            progress.line(f"  metrics    http://{router.metrics_address}/metrics")
            progress.line("Ctrl-C stops it.")
            await stopped.wait()
            await drain_at_sigterm(router, progress, signals)
            progress.line("Stopping the router.")
