"""Who imports this has NIXL, loaded as kvrelay loads it: what makes the processes of peers does."""

from __future__ import annotations

from kvrelay.kv_transfer.nixl_library import load_nixl

load_nixl()
