"""The command lines in the chart's pods, as kvrelay's own parser reads them."""

from __future__ import annotations

import re
from typing import Any

from kvrelay.deploy.commands.router import router
from kvrelay.deploy.commands.status import status
from kvrelay.deploy.commands.up import up
from kvrelay.deploy.options.serve_options import RouterProcessOptions
from kvrelay.deploy.options.up_options import UpOptions
from tests.kubernetes.chart import Manifest, pods


def controller_options(manifests: list[Manifest]) -> UpOptions:
    """What `kvrelay up` is told in the controller's container."""
    container = pods(manifests)["head"].container("controller")
    shell, option, _, _ = container["command"]
    assert (shell, option) == ("sh", "-c")
    command, *arguments = container["args"]
    assert command == up.name
    parsed = up.make_context("up", arguments).params
    del parsed["debug"]
    return UpOptions(**parsed)


def looks_options(manifests: list[Manifest]) -> list[dict[str, Any]]:
    """How the controller's container looks whether the controller is there, in each place."""
    [_, _, script, _] = pods(manifests)["head"].container("controller")["command"]
    parsed = []
    for words in re.findall(r"\bkvrelay (?!\"\$@\")(.*?) >", script):
        command, *arguments = words.split()
        assert command == status.name
        parsed.append(status.make_context("status", arguments).params)
    return parsed


def router_options(manifests: list[Manifest]) -> tuple[RouterProcessOptions, dict[str, Any]]:
    """What `kvrelay router` is told of its own work, and of how it asks the controller."""
    container = pods(manifests)["router"].container("router")
    assert container["command"] == ["kvrelay"]
    command, *arguments = container["args"]
    assert command == router.name
    parsed = router.make_context("router", arguments).params
    names = ("debug", "address", "ray_address", "cluster_name", "token_file", "ca", "tls")
    own = {name: parsed.pop(name) for name in names}
    return RouterProcessOptions(**parsed), own
