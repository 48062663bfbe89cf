"""What draws the pictures of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from docs.tools.dashboards.spec import STATES
from docs.tools.pictures.doors import Doors
from docs.tools.pictures.publish import COLOURS, publish

READY = """
  model      /models/tiny
  gRPC       127.0.0.1:50051
  HTTP       http://127.0.0.1:8000
  admin      127.0.0.1:50052
  metrics    http://127.0.0.1:9400/metrics
  prefill-0  http://127.0.0.1:9401/metrics
"""


def test_the_doors_are_those_that_serve_prints():
    assert Doors.printed(READY) == Doors(
        "127.0.0.1:50051", "127.0.0.1:8000", "127.0.0.1:50052", "127.0.0.1:9400"
    )
    with pytest.raises(ValueError, match="no metrics"):
        Doors.printed(READY.replace("  metrics ", "  other   "))


def test_a_state_that_few_pages_have_keeps_its_color(tmp_path: Path):
    drawn, folder = tmp_path / "drawn.png", tmp_path / "docs"
    folder.mkdir()
    picture = Image.linear_gradient("L").resize((800, 800)).convert("RGB")
    for index, color in enumerate(STATES.values()):
        picture.paste(color, (20 * index, 10, 20 * index + 8, 18))
    picture.save(drawn)
    publish(drawn, folder)
    with Image.open(folder / "drawn.png") as small:
        assert small.mode == "P"
        assert len(small.getcolors() or ()) <= COLOURS
        shown = small.convert("RGB")
    for index, color in enumerate(STATES.values()):
        wanted = tuple(bytes.fromhex(color[1:]))
        found = shown.getpixel((20 * index + 4, 14))
        assert isinstance(found, tuple)
        assert max(abs(one - other) for one, other in zip(wanted, found, strict=True)) <= 8, color
