"""`kvrelay serve`: a cluster on this machine, until it is told to stop."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import shlex
import shutil
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvrelay.deploy.config_file import load_defaults
from kvrelay.deploy.converted import ConvertedModels
from kvrelay.deploy.edge import with_clear_errors
from kvrelay.deploy.models import Model, resolve_model, users_models
from kvrelay.deploy.options import (
    DEFAULT_GRPC,
    DEVICES,
    DTYPES,
    PAGE_ORDERS,
    PREFIX_INDEXES,
    SPECULATIONS,
    VERIFY_PAGES,
    WORKER_HOST,
    ServeOptions,
)
from kvrelay.deploy.params import ADDRESS, FILE, SIZE, SWITCH
from kvrelay.deploy.progress import Progress
from kvrelay.deploy.sizes import format_size
from kvrelay.deploy.stop_signals import StopSignals

if TYPE_CHECKING:
    from kvrelay.deploy.deployment import Deployment

_DEFAULTS = ServeOptions()
_POSITIVE = click.IntRange(min=1)
_NOT_NEGATIVE = click.IntRange(min=0)
_PART = click.FloatRange(min=0, max=1)


@click.command(context_settings={"show_default": True})
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=load_defaults,
    help="TOML file with these options, by their names; the command line wins.",
)
@click.option(
    "--model",
    default=_DEFAULTS.model,
    metavar="PATH_OR_ID",
    help="Checkpoint folder (safetensors), .gguf file, hub id, or the default's alias.",
)
@click.option("--model-name", show_default="from --model", help="What clients call the model.")
@click.option("--prefill", type=_NOT_NEGATIVE, show_default="1", help="Prefill workers.")
@click.option("--decode", type=_NOT_NEGATIVE, show_default="1", help="Decode workers.")
@click.option(
    "--aggregated",
    type=_NOT_NEGATIVE,
    default=_DEFAULTS.aggregated,
    help="Workers that do both, in place of prefill and decode workers.",
)
@click.option(
    "--page-size", type=_POSITIVE, default=_DEFAULTS.page_size, help="Tokens in a page of KV."
)
@click.option(
    "--page-order",
    type=click.Choice(PAGE_ORDERS),
    default=_DEFAULTS.page_order,
    help="Whether a page's layers lie together, or a layer's pages.",
)
@click.option(
    "--prefix-index",
    type=click.Choice(PREFIX_INDEXES),
    default=_DEFAULTS.prefix_index,
    help="How workers find prefixes of earlier requests again: in a radix tree, or not at all.",
)
@click.option(
    "--kv-memory",
    type=SIZE,
    default=format_size(_DEFAULTS.kv_memory),
    help="KV memory of each worker: bytes, or like 512MiB, 2GiB.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=_DEFAULTS.dtype,
    help="Of weights, activations and KV.",
)
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    default=_DEFAULTS.device,
    help="Where workers compute; auto: cuda if there is one.",
)
@click.option(
    "--grpc", type=ADDRESS, default=str(_DEFAULTS.grpc), help="Clients connect here; port 0: any."
)
@click.option(
    "--metrics",
    type=ADDRESS,
    default=str(_DEFAULTS.metrics),
    help="Prometheus reads the router here, and the workers at the next ports of 127.0.0.1, "
    "prefill first; port 0: any.",
)
@click.option(
    "--tls-cert",
    type=FILE,
    help="TLS between router and workers, and for clients, too: the certificate, in PEM. It must "
    f"name {WORKER_HOST}, where workers listen.",
)
@click.option("--tls-key", type=FILE, help="Its private key.")
@click.option(
    "--tls-ca",
    type=FILE,
    help="Its authority: router and workers refuse each other without a certificate of it.",
)
@click.option(
    "--front-tls-cert", type=FILE, help="TLS for clients alone, or with another certificate."
)
@click.option("--front-tls-key", type=FILE, help="Its private key.")
@click.option(
    "--auth-token-file",
    type=FILE,
    help="Clients must bring one of the tokens in it, one a line, but for health checks.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Allow --grpc without TLS and tokens, and --metrics, which has neither, on addresses "
    "that other machines reach.",
)
@click.option(
    "--max-running",
    type=_POSITIVE,
    default=_DEFAULTS.max_running,
    help="Requests that hold memory on a worker at the same time.",
)
@click.option(
    "--chunk-tokens",
    type=_POSITIVE,
    default=_DEFAULTS.chunk_tokens,
    help="Prompt tokens that one prefill step computes at most.",
)
@click.option(
    "--max-model-len",
    type=_POSITIVE,
    show_default="the model's own",
    help="Caps prompt and output together, in tokens.",
)
@click.option(
    "--overlap",
    type=SWITCH,
    default=_DEFAULTS.overlap,
    show_default="on",
    help="Plan a step while the one before computes; the tokens are the same.",
)
@click.option(
    "--growth-min",
    type=_PART,
    default=_DEFAULTS.growth_min,
    help="Of a request's max_tokens, the part that admission reserves for growth at least.",
)
@click.option(
    "--growth-max",
    type=_PART,
    default=_DEFAULTS.growth_max,
    help="That part at most.",
)
@click.option(
    "--bypass-limit",
    type=_NOT_NEGATIVE,
    default=_DEFAULTS.bypass_limit,
    help="Requests that may pass one that does not fit, before none may.",
)
@click.option(
    "--speculation",
    type=click.Choice(SPECULATIONS),
    default=_DEFAULTS.speculation,
    help="Who drafts tokens that a step then verifies, several at once; the tokens are the same.",
)
@click.option(
    "--draft-model",
    metavar="PATH_OR_ID",
    help="The model that drafts, with --speculation draft; as --model.",
)
@click.option(
    "--num-draft-tokens",
    type=_POSITIVE,
    default=_DEFAULTS.num_draft_tokens,
    help="Tokens in a draft at most.",
)
@click.option(
    "--verify-pages",
    type=click.Choice(VERIFY_PAGES),
    default=_DEFAULTS.verify_pages,
    help="Compare checksums of the pages that a decode worker has read: of none, of a sample of "
    "each request's, or of all.",
)
@click.option(
    "--min-transfer-gbps",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.min_transfer_gbps,
    help="A decode worker refuses a prefill worker whose pages it reads slower, in GB/s, by the "
    "probe that it makes when they meet.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="A request that would have to be computed again, as its worker or its KV was lost, fails "
    "instead and says why; retractions excepted.",
)
@click.option(
    "--threads",
    type=_POSITIVE,
    show_default="the cores shared out",
    help="CPU threads of one worker's forward.",
)
@click.option(
    "--default-max-tokens",
    type=_POSITIVE,
    default=_DEFAULTS.default_max_tokens,
    help="Output tokens of a request that sets no limit.",
)
@click.option(
    "--max-live-requests",
    type=_POSITIVE,
    default=_DEFAULTS.max_live_requests,
    help="Requests above this many are refused, with a hint to retry.",
)
@click.option(
    "--worker-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULTS.worker_timeout,
    help="Seconds without an answer of its engine after which a worker is killed and replaced.",
)
@click.option(
    "--drain-grace",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.drain_grace,
    help="Seconds that requests may still take on a worker that drains, until they are moved.",
)
@click.option(
    "--quarantine-limit",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.quarantine_limit,
    help="Seconds that memory may be in quarantine until its worker drains and restarts; 0: never.",
)
@click.option(
    "--debug-retract-every",
    type=_NOT_NEGATIVE,
    default=_DEFAULTS.debug_retract_every,
    help="Retract a request every so many steps, for tests; 0: only when memory is short.",
)
@click.option(
    "--debug-faults",
    metavar="SPECS",
    default=_DEFAULTS.debug_faults,
    show_default="none",
    help="What is to go wrong, for drills: [WORKER/]ACTION:WHERE[:N][:SECONDSs], with commas "
    "between them; e.g. delay:pull:3:0.5s or prefill-0/kill:announced.",
)
@click.option(
    "--audit-pages",
    is_flag=True,
    help="Check every single page after every step; for debugging, it costs time.",
)
@with_clear_errors
def serve(*, debug: bool, **options: Any) -> None:
    """Serve a model from this machine.

    Starts a Ray of its own, prefill and decode workers (or aggregated ones) and a
    router, says when they are ready, and runs until Ctrl-C, which stops all of
    them and nothing else. A second Ctrl-C does not wait.
    """
    run(ServeOptions(**options), Progress(sys.stdout), debug=debug)


def run(options: ServeOptions, progress: Progress, *, debug: bool) -> None:
    """Serve until a signal comes, and leave nothing running.

    Returns after a stop that was asked for when the cluster was ready; a signal
    before that exits with 128 + its number.
    """
    with StopSignals() as signals:
        try:
            options.check_files()
            options.grpc.check_free("--grpc")
            for address in (options.metrics, *options.worker_metrics()):
                address.check_free("--metrics")
            progress.line(_headline(options))
            model = _find_model(options, progress)
            _run_cluster(options, model, progress, signals, debug=debug)
        except (KeyboardInterrupt, asyncio.CancelledError):
            progress.line("Stopped before it was ready.")
            sys.exit(128 + (signals.received or signal.SIGINT))
    progress.line("Stopped.")


def _headline(options: ServeOptions) -> str:
    version = importlib.metadata.version("kvrelay")
    memory = format_size(options.kv_memory)
    workers = " + ".join(f"{count} {role}" for role, count in options.roles.items())
    return f"kvrelay {version}: {workers}, {options.dtype}, {memory} of KV each"


def _find_model(options: ServeOptions, progress: Progress) -> Model:
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
    options: ServeOptions, progress: Progress, converted: ConvertedModels
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
    options: ServeOptions, model: Model, progress: Progress, signals: StopSignals, *, debug: bool
) -> None:
    """Start Ray, then all that runs in it; on the way out end both."""
    with ExitStack() as stack:
        with progress.step("ray", "starting a local one") as step:
            # Here, because Ray, torch and what else it brings take seconds to import.
            from kvrelay.deploy.local_ray import LocalRay

            ray = stack.enter_context(LocalRay(options.workers, keep_logs=debug))
            signals.install()
            step.say(f"logs in {ray.logs}")
        asyncio.run(_serve(options, model, progress, signals, debug=debug))
        progress.line("Stopping Ray.")


async def _serve(
    options: ServeOptions, model: Model, progress: Progress, signals: StopSignals, *, debug: bool
) -> None:
    from kvrelay.deploy.deployment import deployed

    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None
    signals.deliver_to(lambda: loop.call_soon_threadsafe(task.cancel))
    log_level = logging.INFO if debug else logging.WARNING
    try:
        async with deployed(options, model, progress, log_level=log_level) as deployment:
            signals.deliver_to(lambda: loop.call_soon_threadsafe(stopped.set))
            _say_ready(deployment, model, options, progress)
            await stopped.wait()
            progress.line("Stopping the router and the workers.")
    finally:
        signals.stopping()  # the loop that it was delivered to ends here


def _say_ready(
    deployment: Deployment, model: Model, options: ServeOptions, progress: Progress
) -> None:
    router = deployment.router
    progress.line(f"Ready in {progress.elapsed:.1f} s.")
    progress.line()
    progress.line(f"  model      {model.path}")
    progress.line(f"  gRPC       {router.grpc_address}")
    progress.line(f"  metrics    http://{router.metrics_address}/metrics")
    for name, worker in sorted(deployment.cluster.workers.items()):
        progress.line(f"  {name:<10} http://{worker.metrics_address}/metrics")
    progress.line()
    server = "" if router.grpc_address == str(DEFAULT_GRPC) else f" --server {router.grpc_address}"
    example = 'generate "The capital of France is" --max-tokens 32'
    progress.line(f"Try:  {_command()} {example}{server}{_access(options)}")
    progress.line("Ctrl-C stops it.")


def _access(options: ServeOptions) -> str:
    """What a client must be told, beside the address."""
    access = ""
    if options.front_tls_cert is not None:
        access += " --tls"
    elif options.tls_ca is not None:
        access += f" --ca {shlex.quote(str(options.tls_ca))}"
    if options.auth_token_file is not None:
        access += f" --token-file {shlex.quote(str(options.auth_token_file))}"
    return access


def _command() -> str:
    """How a shell finds this program: as it was called, unless its name is enough."""
    called = sys.argv[0]
    if Path(called).name != "kvrelay":
        return f"{shlex.quote(sys.executable)} -m kvrelay.deploy"
    found = shutil.which("kvrelay")
    return "kvrelay" if found and Path(found).samefile(called) else shlex.quote(called)
