"""`kvrelay top`: a view of the cluster in a terminal, refreshed again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.commands.status import ask
from kvrelay.deploy.commands.top_screen import View, lines
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.reach.grpc_target import CommandAccess, with_access, with_server
from kvrelay.deploy.stop_signals import StopSignals

Ask = Callable[[], dict[str, Any]]


@click.command()
@click.option("--once", is_flag=True, help="Print one screen, with the rates of one interval.")
@click.option(
    "--interval",
    "interval_seconds",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two screens.",
)
@with_server
@with_clear_errors
@with_access
def top(
    *, debug: bool, once: bool, interval_seconds: float, server: Address, access: CommandAccess
) -> None:
    """Show requests by phase, rates, workers, and how full their pools are; Ctrl-C ends it.

    A terminal shows one screen that changes; a dumb terminal, a file or a pipe gets one after
    another.
    """
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    views = _views(lambda: ask(server, access), str(server), interval_seconds)
    with StopSignals():
        try:
            if once:
                _first, second = next(views), next(views)
                if second.problem:
                    raise DeployError(second.problem)
                _print(console, second)
            elif console.is_terminal and not console.is_dumb_terminal:
                _show(console, views)
            else:
                for view in views:
                    _print(console, view)
                    console.line()
        except KeyboardInterrupt:
            return


def _views(ask_now: Ask, server: str, interval_seconds: float) -> Iterator[View]:
    """Yield a view of the cluster after each interval.

    If the router does not answer the first time, this raises DeployError. Later its last report
    stays, with the problem beside it.
    """
    view = View(server, ask_now())
    while True:
        yield view
        time.sleep(interval_seconds)
        try:
            view = view.next(ask_now())
        except DeployError as error:
            view = view.without_answer(str(error))


def _show(console: Console, views: Iterator[View]) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for view in views:
            size = console.size
            live.update(Group(*lines(view, size.width, size.height)), refresh=True)


def _print(console: Console, view: View) -> None:
    for line in lines(view, console.width, None):
        console.print(line)
