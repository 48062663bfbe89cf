"""The loading of NIXL in a process, by one function for all users.

UCX's module for EFA needs the system's libefa, which NIXL's wheels do not bring. That needs the
system's libnl-route, of which the wheels do bring a copy. If the module loads the system's
libnl-route, that library's initialisers call the copy's functions.

The copy refuses to register names that it already has. When the process ends, it unregisters what
it never registered: SIGSEGV, after all work is done. A system library that was loaded earlier calls
its own functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from types import ModuleType

_SYSTEM_LIBRARY = "libnl-route-3.so.200"


def load_nixl() -> ModuleType:
    """Load `nixl._api`. Loads the system's libnl-route first, if there is one.

    Raises:
        ImportError: NIXL is not installed, or cannot be loaded.
    """
    with contextlib.suppress(OSError):  # a machine without it has no libefa
        ctypes.CDLL(_SYSTEM_LIBRARY)
    return importlib.import_module("nixl._api")
