"""Every method of every listener has a rule, and every rule is one of a method."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from grpc.aio._server import Server
from starlette.applications import Starlette

import kvrelay.v1
from kvrelay.net.door_rules import GRPC, HTTP, LISTENERS, METRICS, OPERATORS, MethodAccess
from kvrelay.observe.metrics_server import MetricsServer
from kvrelay.router.access.auth import current_caller
from kvrelay.router.callers import STRANGER, Right
from kvrelay.router.config import RouterConfig
from kvrelay.router.discovery import StaticDiscovery
from kvrelay.router.doors.http import http_door
from kvrelay.router.router import Router

from .http.client import with_http
from .test_auth import no_workers


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[object, set[str]]:
    """The methods that are added to gRPC servers from now on, by server."""
    methods: dict[object, set[str]] = defaultdict(set)
    add = Server.add_generic_rpc_handlers

    def noted(server: Server, handlers: Any) -> None:
        methods[server].update(*(handler._method_handlers for handler in handlers))
        add(server, handlers)

    monkeypatch.setattr(Server, "add_generic_rpc_handlers", noted)
    return methods


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The routes of the HTTP applications that are made from now on."""
    made: set[str] = set()

    class Noted(Starlette):
        def __init__(self, routes: Any, **fields: Any) -> None:
            for route in routes:
                made.update(f"{method} {route.path}" for method in route.methods - {"HEAD"})
            super().__init__(routes=routes, **fields)

    monkeypatch.setattr(http_door, "Starlette", Noted)
    return made


async def test_all_methods_of_a_router_have_rules(
    config: RouterConfig,
    tmp_path: Path,
    registered: dict[object, set[str]],
    routes: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages: set[str] = set()
    make = MetricsServer.__init__

    def noted(server: MetricsServer, *args: Any) -> None:
        pages.update(f"GET {path}" for path in args[-1])
        make(server, *args)

    monkeypatch.setattr(MetricsServer, "__init__", noted)
    router = Router(with_http(config, tmp_path), StaticDiscovery([]), no_workers())
    await router.start()
    await router.stop()
    assert sorted(map(sorted, registered.values())) == sorted(
        [sorted(GRPC.methods), sorted(OPERATORS.methods)]
    )
    assert routes == set(HTTP.methods)
    assert pages | {"GET /metrics"} == set(METRICS.methods)


def test_all_services_of_the_protocol_have_rules() -> None:
    """Those of workers, too: without a rule, a method is not served."""
    ruled = {method for rule in LISTENERS.values() for method in rule.methods}
    named = [one.name for one in pkgutil.iter_modules(kvrelay.v1.__path__)]
    found = set()
    for name in named:
        if name.endswith("_pb2"):
            described = importlib.import_module(f"kvrelay.v1.{name}").DESCRIPTOR
            for service in described.services_by_name.values():
                found |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    assert found, "it looks in the right place"
    assert found <= ruled
    assert {one for one in ruled if one.startswith("/kvrelay.")} == found


def test_every_rule_has_bounds_for_strangers() -> None:
    for name, listener in LISTENERS.items():
        assert listener.cost, name
        for method, rule in listener.methods.items():
            if rule.access is MethodAccess.ANYBODY:
                assert rule.most_bytes is not None, method
                assert rule.most is not None, method


async def test_without_a_call_nobody_is_the_caller() -> None:
    with pytest.raises(LookupError):
        current_caller()
    assert not any(STRANGER.may(right) for right in Right)
