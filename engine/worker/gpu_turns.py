"""The start of workers that share a GPU: one after the other, each told what the others have."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

logger = logging.getLogger(__name__)

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108
_NVML: Final = "libnvidia-ml.so.1"
_SUCCESS: Final = 0
_UUID_PREFIXES: Final = ("GPU-", "MIG-")
"""The beginnings of NVML's names of devices; torch leaves them out."""


class GpuTurns:
    """The turns of the workers of one user that share a GPU, each in a process of its own.

    One takes memory after the other, so that each knows what it has taken itself. The kernel gives
    the turn on when a process ends, however it ends.

    Args:
        gpu: a name of the GPU that is the same for all of them.
        directory: one that all of them reach.
    """

    def __init__(self, gpu: str, directory: Path = _SHARED_MEMORY) -> None:
        self._path = directory / f"kvrelay-gpu-{os.geteuid()}-{gpu}"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and have it until the context ends. Blocks, for minutes perhaps.

        Raises:
            ValueError: the directory cannot be written; the message begins with an option.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise ValueError(
                f"worker_gpus: workers that share a GPU take turns by {self._path}, which cannot "
                f"be written ({error.strerror}): mount {self._path.parent} so that they can, or "
                "give each worker a whole GPU"
            ) from error
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waits until another worker has taken its memory of this GPU")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def taken_before(device: torch.device) -> int:
    """Measure what others have taken of a GPU, in bytes, before this process takes any of it.

    CUDA itself would make this process's context to answer, and count it. So NVML is asked; where
    it is not there CUDA is, and the context, about 0.5 GiB, counts as the others'.
    """
    properties = torch.cuda.get_device_properties(device)
    free = nvml_free(str(properties.uuid), _NVML)
    if free is None:
        free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(properties.total_memory) - free)


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def nvml_free(uuid: str, name: str) -> int | None:
    """Ask the driver's NVML for the free bytes of a GPU; None, with a line in the log: it fails.

    Args:
        uuid: the GPU's, as torch has it.
        name: the library's.
    """
    try:
        return _ask_nvml(ctypes.CDLL(name), uuid)
    except (OSError, AttributeError) as error:
        logger.warning("free memory is asked of CUDA, which takes some for that: NVML: %s", error)
        return None


def _ask_nvml(nvml: Any, uuid: str) -> int:
    """Raise OSError with NVML's status if a call fails, AttributeError if there is no such call."""
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    _check("nvmlInit_v2", nvml.nvmlInit_v2())
    try:
        names = ((prefix + uuid).encode() for prefix in _UUID_PREFIXES)
        find = nvml.nvmlDeviceGetHandleByUUID
        if not any(find(name, ctypes.byref(handle)) == _SUCCESS for name in names):
            raise OSError(f"there is no GPU {uuid}")
        status = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        _check("nvmlDeviceGetMemoryInfo", status)
    finally:
        nvml.nvmlShutdown()
    return int(memory.free)


def _check(call: str, status: int) -> None:
    if status != _SUCCESS:
        raise OSError(f"{call} returned {status}")
