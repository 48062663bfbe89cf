"""The listener for operators and other routers: whoever supervises the workers has one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

import grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.net.ends import front_server
from kvrelay.net.tls import TlsFiles
from kvrelay.router.admin import Administrator, AdminService
from kvrelay.router.controller_service import ControllerService
from kvrelay.router.discovery import Discovery
from kvrelay.router.listening import listen
from kvrelay.router.scrape_targets import ScrapeTargets
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, controller_pb2, controller_pb2_grpc

_ADMIN: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_CONTROLLER: Final = controller_pb2.DESCRIPTOR.services_by_name["ControllerService"].full_name
_MESSAGE_BYTES: Final = 64 << 10


async def serve_operators(
    undo: contextlib.AsyncExitStack,
    address: str,
    tls: TlsFiles | None,
    guards: Sequence[grpc.aio.ServerInterceptor],
    administrator: Administrator,
    discovery: Discovery,
    targets: ScrapeTargets,
    requests_of: Callable[[str], int | None] = lambda incarnation: None,
) -> str:
    """Listens for operators and for other routers until `undo`; its address with the real port.

    Raises StartError if it cannot.

    Args:
        undo: stops it.
        address: where.
        tls: the certificate to show.
        guards: are asked before a call's message is received.
        administrator: carries out operators' calls.
        discovery: the workers, for other routers.
        targets: is told of the routers that listen.
        requests_of: how many requests an incarnation has; None: nobody here knows.
    """
    server = front_server(_MESSAGE_BYTES, guards)
    admin = AdminService(administrator, requests_of)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    watched = ControllerService(discovery, targets, administrator.state)
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(watched, server)
    reflection.enable_server_reflection([_ADMIN, _CONTROLLER, reflection.SERVICE_NAME], server)
    return await listen(undo, server, address, tls, "admin")
