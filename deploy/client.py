"""How the client commands connect to a running cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import click
import grpc

from kvrelay.deploy.address import DEFAULT_ADMIN, DEFAULT_GRPC, Address
from kvrelay.deploy.environment import TOKEN_VARIABLE, Environment
from kvrelay.deploy.errors import DeployError, OptionError
from kvrelay.deploy.params import ADDRESS, FILE
from kvrelay.net.options import MAX_MESSAGE_BYTES, message_bounds
from kvrelay.net.tls import TlsFileError, check_certificates
from kvrelay.router.auth import bearer
from kvrelay.router.token_file import read_plain_tokens
from kvrelay.v1 import inference_pb2_grpc as rpc

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Access:
    """What a client needs to be let into a cluster: TLS and a token."""

    tls: bool = False
    """Whether to use TLS."""
    ca: Path | None = None
    """The authority that must have signed the server's certificate; None: any public one."""
    token: str | None = field(default=None, repr=False)

    @classmethod
    def given(cls, token_file: Path | None, ca: Path | None, *, tls: bool) -> Self:
        """From the options and the environment. Raises DeployError for a token that is unusable."""
        return cls(tls or ca is not None, ca, _token(token_file))

    @property
    def metadata(self) -> Metadata:
        """What is sent with every call."""
        return () if self.token is None else bearer(self.token)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """For a channel; None: plain text. Raises OptionError if the file of --ca is unusable."""
        if not self.tls:
            return None
        if self.ca is None:
            return grpc.ssl_channel_credentials()
        try:
            check_certificates("ca", self.ca)
        except TlsFileError as error:
            raise OptionError("--ca", error.problem) from error
        return grpc.ssl_channel_credentials(self.ca.read_bytes())

    def check(self, server: Address) -> None:
        """Raise DeployError if the token would go to another machine in plain text."""
        if self.token is not None and not self.tls and not server.is_loopback:
            raise DeployError(
                f"{server}: the token would go to another machine in plain text: "
                "give --ca, or --tls"
            )


OPEN: Final = Access()

with_server = click.option(
    "--server",
    type=ADDRESS,
    default=str(DEFAULT_GRPC),
    show_default=True,
    help="Where the cluster's router listens.",
)
"""Gives a command the router's address as `server`."""
with_admin = click.option(
    "--admin",
    type=ADDRESS,
    default=str(DEFAULT_ADMIN),
    show_default=True,
    help="Where the cluster's router listens to operators.",
)
"""Gives a command the address of the router's admin service as `admin`."""


def with_access(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --tls, --ca and --token-file, and call it with the `access` they mean."""

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
            access = Access.given(token_file, ca, tls=tls)
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
    """A context with a stub of the service at `server`.

    A call that fails raises DeployError in it, with server, status and message in one line.
    """
    with open_channel(server, credentials) as channel:
        try:
            yield stub(channel)
        except grpc.RpcError as error:
            raise DeployError(f"{server}: {error.code().name}: {error.details()}") from error


def open_channel(server: Address, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """A channel to `server`; without credentials, in plain text."""
    options = message_bounds(MAX_MESSAGE_BYTES)
    if server.is_loopback:
        # Not through the user's web proxy, which would look for it on its own machine.
        options.append(("grpc.enable_http_proxy", 0))
    if credentials is None:
        return grpc.insecure_channel(str(server), options)
    return grpc.secure_channel(str(server), credentials, options)
