"""How a picture gets into the documentation: small."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import click
from PIL import Image

from docs.tools.dashboards.spec import STATES

COLOURS: Final = 256
"""Of a picture, so that the files are small."""
MAX_BYTES: Final = 150_000


def publish(drawn: Path, folder: Path) -> None:
    """Put a picture where the documentation has it, and say so if it is too large."""
    to = folder / drawn.name
    if drawn.suffix == ".png":
        with Image.open(drawn) as opened:
            picture = opened.convert("RGB")
        few = picture.quantize(palette=_palette(picture), dither=Image.Dither.NONE)
        few.save(to, optimize=True)
    else:
        shutil.copy(drawn, to)
    if (size := to.stat().st_size) > MAX_BYTES:
        click.echo(f"{to} has {size} bytes, more than {MAX_BYTES}", err=True)


def _palette(picture: Image.Image) -> Image.Image:
    """The commonest colours as they are, and those of pages' states: others are at an edge.

    Pillow's own palettes merge those of a thin line.
    """
    counted: Any = picture.getcolors(picture.width * picture.height)
    states = [bytes.fromhex(color[1:]) for color in STATES.values()]
    commonest = [bytes(colour) for _, colour in sorted(counted, reverse=True)]
    palette = Image.new("P", (1, 1))
    palette.putpalette(b"".join([*states, *commonest][:COLOURS]))
    return palette
