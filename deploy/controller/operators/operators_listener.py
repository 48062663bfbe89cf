"""The listener for operators and other routers, in the process that supervises the workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from kvrelay.deploy.controller.operators.admin_service import Administrator, AdminService
from kvrelay.deploy.controller.operators.controller_service import ControllerService
from kvrelay.deploy.controller.operators.scrape_targets import ScrapeTargets
from kvrelay.net.channels import front_server
from kvrelay.net.door_rules import OPERATORS
from kvrelay.net.reflection import enable_reflection
from kvrelay.net.tls import TlsFiles
from kvrelay.router.access.auth import Guard, name_caller
from kvrelay.router.access.token_file import Tokens
from kvrelay.router.discovery import Discovery
from kvrelay.router.doors.listening import listen
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, controller_pb2, controller_pb2_grpc

_ADMIN: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_CONTROLLER: Final = controller_pb2.DESCRIPTOR.services_by_name["ControllerService"].full_name


class OperatorServices:
    """The gRPC services for operators and for other routers, and what Prometheus is to scrape.

    A router that shares its process with the workers' supervisor serves them, and so does a
    controller without a router.

    Args:
        administrator: carries out operators' calls.
        discovery: lists the workers for other routers.
        cluster_name: the value of the label `cluster` of all scrape targets.
    """

    def __init__(
        self, administrator: Administrator, discovery: Discovery, cluster_name: str
    ) -> None:
        self._administrator = administrator
        self._discovery = discovery
        self._targets = ScrapeTargets(cluster_name, discovery)
        self.pages: Mapping[str, Callable[[str], bytes]] = {"/sd": self._targets.json}
        """Pages to serve beside metrics, by path; each is made for the address that was asked."""

    async def serve(
        self,
        undo: contextlib.AsyncExitStack,
        address: str,
        tls: TlsFiles | None,
        tokens: Callable[[], Tokens] | None,
        requests_of: Callable[[str], int | None] = lambda incarnation: None,
    ) -> str:
        """Listen until `undo`, and return the address with its real port.

        Args:
            undo: stops it.
            address: ``host:port`` to listen on.
            tls: the certificate to show.
            tokens: returns the tokens that are valid now; None: no call needs one.
            requests_of: counts an incarnation's requests; None: nobody here knows.

        Raises:
            StartError: it cannot listen there.
        """
        assert OPERATORS.most_bytes is not None
        guards = [Guard(tokens, OPERATORS)]
        server = front_server(OPERATORS, OPERATORS.most_bytes, guards=guards, caller_of=name_caller)
        admin = AdminService(self._administrator, requests_of)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        watched = ControllerService(self._discovery, self._targets, self._administrator.state)
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(watched, server)
        enable_reflection([_ADMIN, _CONTROLLER], server)
        return await listen(undo, server, address, tls, "admin")
