"""The specification of a detached controller, as it is kept in the store."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvrelay.deploy.errors import ClusterError
from kvrelay.deploy.nodes.on_node import NODES_ADDRESS
from kvrelay.deploy.nodes.ray_places import PlacementPlan
from kvrelay.engine.config import WorkerConfig
from kvrelay.net.tls import TlsFiles
from kvrelay.wire.version import VERSION as KVRELAY_VERSION

VERSION: Final = 1
SPEC: Final = "spec"
"""The store's key of the specification. The first process to write it claims the cluster's name."""
WHERE: Final = "controller"
"""The store's key of the address at which the present controller listens."""
FAILED: Final = "failed"
"""The store's key of the reason why the first workers did not start."""


@dataclass(frozen=True, slots=True)
class ControllerSpec:
    """The workers of a cluster, and the addresses of its controller."""

    cluster_name: str
    configs: tuple[WorkerConfig, ...]
    """The configurations of the workers that the cluster begins with."""
    plan: PlacementPlan
    log_level: int
    port: int = 0
    """The port at which the controller listens, at its node's address; 0: any free port."""
    advertised: Mapping[str, str] = field(default_factory=dict)
    """The advertised host of each node, as for workers."""
    tls: TlsFiles | None = None
    """The files of the certificate that the controller shows to routers and operators."""
    auth_token_file: Path | None = None
    metrics_host: str = NODES_ADDRESS
    metrics_port: int = 0
    """The port at which Prometheus reads the controller's metrics and its list of targets."""

    def to_bytes(self) -> bytes:
        """Encode the specification for the store."""
        head = {"version": VERSION, "kvrelay": KVRELAY_VERSION}
        return json.dumps(head).encode() + b"\n" + pickle.dumps(self)

    @classmethod
    def from_bytes(cls, text: bytes) -> ControllerSpec:
        """Decode a specification. Raises ClusterError if another version has written it."""
        line, _, body = text.partition(b"\n")
        head = json.loads(line)
        writer = head.get("kvrelay")
        if head.get("version") != VERSION or writer != KVRELAY_VERSION:
            who = f"kvrelay {writer}" if writer else "another version of kvrelay"
            raise ClusterError(
                f"{who} has started this cluster, and here is {KVRELAY_VERSION}: end it "
                "by `kvrelay down` and start it again, or run the version that it has"
            )
        spec: ControllerSpec = pickle.loads(body)  # noqa: S301 (only Ray's own processes write it)
        return spec
