"""The search for a cluster's controller: by its address, or by asking Ray's head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from kvrelay.deploy.errors import ClusterError, DeployError
from kvrelay.deploy.options.listen_address import DEFAULT_ADMIN, Address
from kvrelay.deploy.options.option_types import ADDRESS
from kvrelay.deploy.reach.grpc_target import CommandAccess, connected
from kvrelay.v1 import admin_pb2_grpc


@dataclass(frozen=True, slots=True)
class Controller:
    """A cluster's controller, as a command's options name it."""

    address: Address | None = None
    """The address at which it listens; None: Ray's head knows it."""
    ray_address: str = ""
    cluster_name: str = "default"

    def find(self) -> Address:
        """Return its present address, which may change with a restart. May block.

        Raises DeployError if there is none.
        """
        if self.address is not None:
            return self.address
        return _ask_head(self.ray_address, self.cluster_name)

    @contextmanager
    def connected(
        self, access: CommandAccess, stub: Any = admin_pb2_grpc.AdminServiceStub
    ) -> Iterator[Any]:
        """Open a context with a stub of a service of it, as the function of this name does."""
        address = self.find()
        access.check(address)
        with connected(address, access.credentials(), stub) as service:
            yield service

    def __str__(self) -> str:
        if self.address is not None:
            return str(self.address)
        return f"of {self.cluster_name} in the Ray at {self.ray_address}"


def with_controller(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a controller, which it gets as `controller`."""
    return _with_controller(command, default=DEFAULT_ADMIN)


def with_controller_if_named(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the same options; `controller` is None if none of them is used."""
    return _with_controller(command, default=None)


def _with_controller(
    command: Callable[..., None], *, default: Address | None
) -> Callable[..., None]:
    @click.option(
        "--controller",
        "--admin",
        "address",
        type=ADDRESS,
        help="Where the cluster listens to operators: the --admin of `kvrelay serve`, or what "
        "`kvrelay up` has said." + ("" if default is None else f"  [default: {default}]"),
    )
    @click.option(
        "--ray-address",
        metavar="auto|HOST:PORT",
        help="The Ray that the cluster runs in: its head is asked for the controller's address.",
    )
    @click.option(
        "--cluster-name", default="default", show_default=True, help="With --ray-address: which."
    )
    @functools.wraps(command)
    def given(
        *, address: Address | None, ray_address: str | None, cluster_name: str, **options: Any
    ) -> None:
        if address is not None and ray_address is not None:
            raise click.UsageError("give --controller or --ray-address")
        found = None
        if ray_address is not None:
            found = Controller(None, ray_address, cluster_name)
        elif address is not None or default is not None:
            found = Controller(address or default)
        command(controller=found, **options)

    return given


def _ask_head(ray_address: str, cluster_name: str) -> Address:
    from kvrelay.deploy.options.environment import allow_many_machines

    allow_many_machines()
    from kvrelay.deploy.controller.controller_spec import WHERE
    from kvrelay.deploy.controller.records.ray_store import read_once
    from kvrelay.deploy.nodes.joined_ray import head_of, namespace_of

    head = head_of(ray_address)
    found = read_once(head, namespace_of(cluster_name), WHERE)
    if found is None:
        raise ClusterError(f"--cluster-name: the Ray at {head} has no controller of {cluster_name}")
    try:
        return Address.parse(found.decode())
    except ValueError as error:
        raise DeployError(f"the controller of {cluster_name}: {error}") from error
