"""The dashboards, each in a module of its own: memory first."""

from __future__ import annotations

from typing import Final

from docs.tools.dashboards.fleet import FLEET
from docs.tools.dashboards.latency import LATENCY
from docs.tools.dashboards.memory import MEMORY
from docs.tools.dashboards.requests import REQUESTS
from docs.tools.dashboards.transfer import TRANSFER

DASHBOARDS: Final = (MEMORY, TRANSFER, LATENCY, REQUESTS, FLEET)
