"""The options of `kvrelay up`: the workers' options, and the controller's address."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.options.listen_address import MAX_PORT, Address
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.options.declaration import Section, option
from kvrelay.options.observing import ObservingOptions
from kvrelay.router.config import RouterOptions

_ROUTERS: Final = {field.name for field in fields(RouterOptions)} | {"grpc", "http", "admin"}
_TOO: Final = {"placement", "auth_token_file", *(field.name for field in fields(ObservingOptions))}
"""The routers' options that workers or the controller also need."""


@dataclass(frozen=True, kw_only=True)
class UpOptions(ServeOptions):
    """A cluster without a router of its own, whose controller listens as its workers do."""

    controller_port: int = option(
        0,
        "Where the controller listens, at the address of Ray's head node (or as --advertise says).",
        Section.ACCESS,
        at_least=0,
        at_most=MAX_PORT,
        shown_default="any free one, which commands learn from Ray",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.joins_ray:
            raise OptionError(
                "--ray-address", "must be given: such a cluster outlives the command, in a Ray"
            )

    def _check_reach(self) -> None:
        super()._check_reach()
        if not self.insecure and not self.listens_on_loopback and self.auth_token_file is None:
            raise OptionError(
                "--auth-token-file",
                "the controller listens at its node's address, which other machines can reach: "
                "give one, or allow it as it is with --insecure",
            )

    def _listeners(self) -> tuple[tuple[str, Address], ...]:
        return ()


UP_OPTIONS: Final = {field.name for field in fields(UpOptions)} - _ROUTERS | _TOO
"""The fields that are options of the command."""
