"""Types of option values that click does not have."""

from __future__ import annotations

from pathlib import Path

import click

from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.sizes import parse_size
from kvrelay.options.memory_share import MemoryShare


class SizeParam(click.ParamType[int]):
    """An amount of memory: ``512MiB``, ``2GiB`` or plain bytes."""

    name = "size"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number of bytes."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class MemoryParam(click.ParamType[int | MemoryShare]):
    """An amount of memory, or a part of a device's: ``auto``, ``0.85`` or ``85%``."""

    name = "size|share|auto"

    def convert(
        self,
        value: str | int | MemoryShare,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> int | MemoryShare:
        """Return the number of bytes, or the share."""
        if isinstance(value, int | MemoryShare):
            return value
        try:
            return MemoryShare.parse(value) or parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class AddressParam(click.ParamType[Address]):
    """``host:port``."""

    name = "host:port"

    def convert(
        self, value: str | Address, param: click.Parameter | None, ctx: click.Context | None
    ) -> Address:
        """Return the address, parsed but not yet bound."""
        if isinstance(value, Address):
            return value
        try:
            return Address.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SwitchParam(click.ParamType[bool]):
    """``on`` or ``off``."""

    name = "on|off"

    def convert(
        self, value: str | bool, param: click.Parameter | None, ctx: click.Context | None
    ) -> bool:
        """Return whether the switch is on."""
        if isinstance(value, bool):
            return value
        if value not in ("on", "off"):
            self.fail(f"{value!r} is neither on nor off", param, ctx)
        return value == "on"


SIZE = SizeParam()
MEMORY = MemoryParam()
SWITCH = SwitchParam()
ADDRESS = AddressParam()
FILE = click.Path(path_type=Path)
"""The type of a path; the code that reads the file checks it."""
