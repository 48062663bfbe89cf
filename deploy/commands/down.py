"""`kvrelay down`: the end of a cluster that `kvrelay up` has started."""

from __future__ import annotations

import asyncio

import click

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.options.environment import allow_many_machines


@click.command()
@click.option(
    "--ray-address",
    metavar="auto|HOST:PORT",
    default="auto",
    show_default=True,
    help="The Ray cluster that it runs in; this machine must be a node of it.",
)
@click.option("--cluster-name", default="default", show_default=True, help="Which cluster.")
@with_clear_errors
def down(*, debug: bool, ray_address: str, cluster_name: str) -> None:
    """End the workers and the controller of a cluster; Ray and everything else in it stay.

    Requests that are live end. It also works without the controller.
    """
    allow_many_machines()
    from kvrelay.deploy.controller.detached import end_cluster
    from kvrelay.deploy.controller.records.ray_store import RayStore
    from kvrelay.deploy.nodes.joined_ray import JoinedRay, namespace_of

    namespace = namespace_of(cluster_name)
    with JoinedRay(ray_address, namespace):
        store = RayStore.of_this_process(namespace)
        if not asyncio.run(end_cluster(store, namespace)):
            raise ClusterError(f"--cluster-name: {cluster_name} does not run in this Ray")
    click.echo(f"{cluster_name} has ended.")
