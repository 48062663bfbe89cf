"""How a process loads NIXL: everybody who needs it asks here.

UCX's module for EFA needs the system's libefa, which NIXL's wheels do not bring, and that needs the
system's libnl-route, of which the wheels do bring a copy. If the module is what loads the system's,
that one's initialisers call the copy's functions. The copy refuses to register what it has under
the same names already, and when the process ends, unregisters what it never registered: SIGSEGV,
after everything is done. A library that was loaded before calls its own functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from types import ModuleType

_SYSTEM_LIBRARY = "libnl-route-3.so.200"


def load_nixl() -> ModuleType:
    """`nixl._api`. Loads the system's libnl-route before, where there is one.

    Raises:
        ImportError: NIXL is not installed, or cannot be loaded.
    """
    with contextlib.suppress(OSError):  # a machine without it has no libefa
        ctypes.CDLL(_SYSTEM_LIBRARY)
    return importlib.import_module("nixl._api")
