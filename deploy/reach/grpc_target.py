"""The client commands' connection to a running cluster: options, credentials, gRPC stub."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import click
import grpc

from kvrelay.client import access as client_access
from kvrelay.client.access import open_channel
from kvrelay.deploy.errors import DeployError, OptionError
from kvrelay.deploy.options.environment import TOKEN_VARIABLE, Environment
from kvrelay.deploy.options.listen_address import DEFAULT_GRPC, Address
from kvrelay.deploy.options.option_types import ADDRESS, FILE
from kvrelay.net.tls import TlsFileError, check_certificates
from kvrelay.router.access.token_file import read_plain_tokens
from kvrelay.v1 import inference_pb2_grpc as rpc


class CommandAccess(client_access.Access):
    """The client library's `CommandAccess`, made from a command's options."""

    @classmethod
    def given(cls, token_file: Path | None, ca: Path | None, *, tls: bool) -> Self:
        """Read the options and the environment. Raises DeployError if the token is unusable."""
        return cls(tls or ca is not None, ca, _token(token_file))

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return a channel's credentials; None: plain text.

        Raises OptionError if the file of --ca is unusable.
        """
        if self.ca is not None:
            try:
                check_certificates("ca", self.ca)
            except TlsFileError as error:
                raise OptionError("--ca", error.problem) from error
        return super().credentials()

    def check(self, server: Address) -> None:
        """Raise DeployError if the token would go to another machine in plain text."""
        if not self.may_reach(str(server)):
            raise DeployError(
                f"{server}: the token would go to another machine in plain text: "
                "give --ca, or --tls"
            )


OPEN: Final = CommandAccess()

with_server = click.option(
    "--server",
    type=ADDRESS,
    default=str(DEFAULT_GRPC),
    show_default=True,
    help="Where the cluster's router listens.",
)
"""A decorator that gives a command the router's address as `server`."""
with_servers = click.option(
    "--server",
    "servers",
    type=ADDRESS,
    multiple=True,
    default=(str(DEFAULT_GRPC),),
    show_default=True,
    help="Where the cluster's router listens. If it is given several times, another one goes on "
    "where one is lost.",
)
"""A decorator that gives a command the addresses of routers as `servers`."""


def with_access(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --tls, --ca and --token-file, and pass it the resulting `access`."""

    @click.option(
        "--token-file",
        type=FILE,
        help=f"Send the first token in this file; without it, the one in {TOKEN_VARIABLE}, if set.",
    )
    @click.option(
        "--ca",
        type=FILE,
        help="Use TLS; the server's certificate must be signed by this authority.",
    )
    @click.option(
        "--tls",
        is_flag=True,
        help="Use TLS; any public authority may have signed the server's certificate.",
    )
    @functools.wraps(command)
    def given(*, token_file: Path | None, ca: Path | None, tls: bool, **options: Any) -> None:
        try:
            access = CommandAccess.given(token_file, ca, tls=tls)
        except DeployError as error:
            raise click.UsageError(str(error)) from error
        command(access=access, **options)

    return given


def _token(path: Path | None) -> str | None:
    if path is None:
        return Environment.read().token
    try:
        return read_plain_tokens(path)[0]
    except ValueError as error:
        raise OptionError("--token-file", str(error)) from error


@contextmanager
def connected(
    server: Address,
    credentials: grpc.ChannelCredentials | None = None,
    stub: Any = rpc.InferenceServiceStub,
) -> Iterator[Any]:
    """Open a context with a stub of the service at `server`.

    A call that fails in it raises DeployError, with server, status and message in one line.
    """
    with open_channel(str(server), credentials) as channel:
        try:
            yield stub(channel)
        except grpc.RpcError as error:
            raise DeployError(f"{server}: {error.code().name}: {error.details()}") from error
