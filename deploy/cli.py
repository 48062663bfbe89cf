"""The `kvrelay` command. Each subcommand is a module that is imported when it is called."""

from __future__ import annotations

import importlib

import click

_COMMANDS = (
    "bench",
    "chat",
    "doctor",
    "down",
    "drain",
    "generate",
    "leave",
    "roll",
    "router",
    "scale",
    "serve",
    "shift",
    "status",
    "top",
    "up",
)


class _Commands(click.Group):
    """The group that imports a subcommand only when it is called: some take seconds to import."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"kvrelay.deploy.commands.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvrelay")
def main() -> None:
    """Serve large language models with prefill and decode on separate workers."""
