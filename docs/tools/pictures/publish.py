"""How a picture gets into the documentation: small."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import click
from PIL import Image

COLOURS: Final = 256
"""Few, so that the files are small."""
MAX_BYTES: Final = 150_000
_COMMON: Final = 30
"""Pixels; a colour that fewer have is between two others, at an edge."""


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
    """Made of the colours that fill more than an edge, each as often as the others.

    By their numbers, those of a thin line would be merged.
    """
    counted: Any = picture.getcolors(picture.width * picture.height)
    common = [bytes(colour) for count, colour in counted if count >= _COMMON]
    return Image.frombytes("RGB", (len(common), 1), b"".join(common)).quantize(COLOURS)
