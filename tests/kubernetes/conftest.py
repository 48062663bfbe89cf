"""The CPU image, built once for all tests that run it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.image import built, why_no_image


@pytest.fixture(scope="session")
def image_root() -> Iterator[Path]:
    """The root folder of a container of it; KVRELAY_TEST_IMAGE names one that is there already."""
    if given := os.environ.get("KVRELAY_TEST_IMAGE"):
        yield Path(given)
        return
    if reason := why_no_image():
        pytest.skip(reason)
    # Not in /tmp, of which hosts have their own.
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="kvrelay-image-") as folder,
        built(Path(folder)) as root,
    ):
        yield root
