"""The connection to a Ray that runs already; it is left as it is.

Where it cannot be joined, one clear line says why.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import grpc

from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.local_ray import ray

_OPTION: Final = "--ray-address"
_ANSWER_SECONDS: Final = 10.0
_START_HERE: Final = "`ray start` makes this machine a node of it"


class JoinedRay:
    """A context in which this process is connected to the Ray cluster of whose nodes one is here.

    When it is left, the actors that this process has placed are gone, and nothing else.

    Args:
        address: the address of the cluster's head, or ``auto`` for this machine's Ray.
        namespace: Ray's namespace, in which this cluster's actors have their names.
        log_level: the level of Ray's own log.
    """

    def __init__(self, address: str, namespace: str, *, log_level: int = logging.ERROR) -> None:
        self._address = address
        self._namespace = namespace
        self._log_level = log_level

    def __enter__(self) -> Self:
        address = head_of(self._address)
        try:
            ray.init(
                address=address,
                namespace=self._namespace,
                logging_level=self._log_level,
            )
        except Exception as error:
            ray.shutdown()
            raise ClusterError(f"{_OPTION}: {_why(error, address)}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        where = self.logs
        ray.shutdown()
        if isinstance(error, Exception):
            error.add_note(f"the workers' logs are in {where} on their nodes")

    def keep_logs(self) -> None:
        """Do nothing: the logs stay as long as Ray."""

    @property
    def logs(self) -> Path:
        """The folder of the logs of Ray's processes and the workers, on each node."""
        context = ray.get_runtime_context()
        return Path(context.get_temp_dir(), context.get_session_name(), "logs")


def namespace_of(cluster_name: str) -> str:
    """Return Ray's namespace of a cluster's actors."""
    return f"kvrelay/{cluster_name}"


def head_of(address: str) -> str:
    """Return the `host:port` of a head that answers; `auto`: the head of this machine's Ray.

    Raises ClusterError, in one line.
    """
    found = _find(address)
    _check(found)
    return found


def _find(address: str) -> str:
    """Return the head's `host:port`."""
    if address != "auto":
        return address
    try:
        found: str = ray._private.services.canonicalize_bootstrap_address_or_die("auto")
    except ConnectionError as error:
        raise ClusterError(f"{_OPTION}: no Ray runs on this machine: {_START_HERE}") from error
    return found


def _check(address: str) -> None:
    """Raise ClusterError unless a head of the same Ray version answers there.

    Ray itself takes minutes to give up.

    Raises ClusterError.
    """
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    with init_grpc_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        request = gcs_service_pb2.CheckAliveRequest()
        try:
            version = head.CheckAlive(request, timeout=_ANSWER_SECONDS).ray_version
        except grpc.RpcError as error:
            raise ClusterError(f"{_OPTION}: {_refusal(error, address)}") from error
    if version and version != ray.__version__:
        raise ClusterError(
            f"{_OPTION}: the Ray at {address} is {version}, here it is {ray.__version__}: all "
            "nodes need the same"
        )


def _refusal(error: grpc.RpcError, address: str) -> str:
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return (
            f"the Ray at {address} refuses the token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, "
            "to what it was started with"
        )
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return f"no Ray answers at {address}"
    return f"what answers at {address} is no Ray's head: {error.details()}"


def _why(error: Exception, address: str) -> str:
    """Return why Ray could not be joined though its head answers, in one line."""
    text = " ".join(str(error).split())
    if "Version mismatch" in text:
        return f"the Ray at {address}: {text}"
    return f"the Ray at {address} cannot be joined from here, {_START_HERE}: {text}"
