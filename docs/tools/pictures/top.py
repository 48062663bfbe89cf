"""Pictures of `kvrelay top`: in a terminal, and what it prints without one."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pyte.screens
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

from docs.tools.pictures.load import KVRELAY
from tests.deploy.terminal import COLUMNS, Terminal

_PLAIN: Final = TerminalTheme((255, 255, 255), (32, 32, 32), [(32, 32, 32)] * 8)
_SECONDS: Final = 60.0
_OF_PYTE: Final = {
    "brown": "yellow",
    **{
        f"bright{colour}": f"bright_{colour}"
        for colour in ("black", "red", "green", "blue", "magenta", "cyan", "white")
    },
    "brightbrown": "bright_yellow",
}
"""Rich's names of colours that the terminal names otherwise."""


def draw_in_a_terminal(target: str, path: Path) -> None:
    """Its screen on 80 x 24, with colours, once it has shown rates."""
    terminal = Terminal(["top", "--server", target], TERM="xterm-256color")
    try:
        terminal.read_until(lambda: "tokens/s" in terminal.text, _SECONDS)
        lines = [_line(cells) for cells in terminal.cells]
    finally:
        terminal.close()
    _save(lines, "kvrelay top", DIMMED_MONOKAI, path)


def draw_once(target: str, path: Path) -> None:
    """What `--once` prints into a pipe, without colours."""
    command = [*KVRELAY, "top", "--once", "--server", target]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": str(COLUMNS)}
    shown = subprocess.run(  # noqa: S603 (our own command)
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    lines = [Text(line) for line in shown.splitlines()]
    _save(lines, "NO_COLOR=1 kvrelay top --once", _PLAIN, path)


def _line(cells: list[pyte.screens.Char]) -> Text:
    line = Text()
    for style, run in itertools.groupby(cells, _style):
        line.append("".join(cell.data for cell in run), style)
    return line


def _style(cell: pyte.screens.Char) -> Style:
    colour = _OF_PYTE.get(cell.fg, cell.fg)
    return Style(color=None if colour == "default" else colour, bold=cell.bold)


def _save(lines: list[Text], title: str, theme: TerminalTheme, path: Path) -> None:
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        color_system="truecolor",
        force_terminal=True,
    )
    for line in lines:
        line.no_wrap = True
        console.print(line, highlight=False)
    svg = console.export_svg(title=title, theme=theme)
    # Its font would be fetched from another host.
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))
