"""A cluster to attack."""

from __future__ import annotations

from tests.cluster import conftest

ray, tiny = conftest.ray, conftest.tiny
"""Fixtures."""
