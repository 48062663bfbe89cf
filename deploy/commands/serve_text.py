"""The output of `kvrelay serve`: its first line, and the addresses once it is ready."""

from __future__ import annotations

import importlib.metadata
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.deploy.nodes.models import ModelFolder
from kvrelay.deploy.options.listen_address import DEFAULT_GRPC
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.deploy.options.sizes import format_size
from kvrelay.options.memory_share import MemoryShare
from kvrelay.router.access.token_file import read_plain_tokens

if TYPE_CHECKING:
    from kvrelay.deploy.deployment import Deployment


def headline(options: ServeOptions) -> str:
    """Return a line with the version and the workers that will run."""
    version = importlib.metadata.version("kvrelay")
    match options.kv_memory:
        case None:  # the default depends on the device
            memory = ""
        case int(size):
            memory = f", {format_size(size)} of KV each"
        case MemoryShare():
            memory = ", what is left of KV each"
    workers = " + ".join(f"{count} {role}" for role, count in options.roles.items())
    return f"kvrelay {version}: {workers}, {options.dtype}{memory}"


def ready_lines(deployment: Deployment, model: ModelFolder, options: ServeOptions) -> Iterator[str]:
    """Yield the addresses of all listeners, and an example to paste."""
    router = deployment.router
    yield ""
    yield f"  model      {model.path}"
    yield f"  gRPC       {router.grpc_address}"
    scheme = "http" if options.front_tls is None else "https"
    http = f"{scheme}://{router.http_address}"
    yield f"  HTTP       {http}"
    yield f"  admin      {router.admin_address}"
    yield f"  metrics    http://{router.metrics_address}/metrics"
    for name, worker in sorted(deployment.cluster.workers.items()):
        on_its_node = " on its node" if options.joins_ray and options.metrics.is_loopback else ""
        yield f"  {name:<10} http://{worker.metrics_address}/metrics{on_its_node}"
    yield ""
    server = "" if router.grpc_address == str(DEFAULT_GRPC) else f" --server {router.grpc_address}"
    example = 'generate "The capital of France is" --max-tokens 32'
    yield f"Try:  {_command()} {example}{server}{_access(options)}"
    yield f"or:   {_curl(http, options)}"
    yield "Ctrl-C stops it."


def _curl(http: str, options: ServeOptions) -> str:
    """Return a call of OpenAI's API, to paste."""
    access = ""
    if options.auth_token_file is not None:
        access += ' -H "Authorization: Bearer TOKEN"'
    if options.front_tls_cert is None and options.tls_ca is not None:
        access += f" --cacert {shlex.quote(str(options.tls_ca))}"
    body = '{"prompt": "The capital of France is", "max_tokens": 32}'
    return f"curl {http}/v1/completions{access} -d '{body}'"


def _access(options: ServeOptions) -> str:
    """Return the options, beside the address, that a client needs for access."""
    access = ""
    if options.front_tls_cert is not None:
        access += " --tls"
    elif options.tls_ca is not None:
        access += f" --ca {shlex.quote(str(options.tls_ca))}"
    if options.auth_token_file is not None:
        access += f" --token-file {_client_token_file(options.auth_token_file)}"
    return access


def _client_token_file(path: Path) -> str:
    """Return a file with a token for clients: the router's own, if that has plain tokens."""
    try:
        read_plain_tokens(path)
    except ValueError:
        return "TOKEN_FILE"
    return shlex.quote(str(path))


def _command() -> str:
    """Return the words that start this program in a shell: its name, if that is enough."""
    called = sys.argv[0]
    if Path(called).name != "kvrelay":
        return f"{shlex.quote(sys.executable)} -m kvrelay.deploy"
    found = shutil.which("kvrelay")
    return "kvrelay" if found and Path(found).samefile(called) else shlex.quote(called)
