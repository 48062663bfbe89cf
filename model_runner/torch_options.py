"""Dtypes and devices by the names that people write; copies to devices, and waiting."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from kvrelay.model_runner.errors import UnsupportedOptionError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of a key of `DTYPES`."""
    if name not in DTYPES:
        raise UnsupportedOptionError(f"dtype {name!r} is unknown: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_device(name: str) -> torch.device:
    """The torch device that `name` means on this machine; ``cuda`` is the first one."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UnsupportedOptionError(f"device {name!r} is unknown: use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedOptionError(f"device {name!r} is not supported: use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UnsupportedOptionError(
            f"device {name!r} is not here: {count} CUDA devices were found"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host's array on the device; on a CPU the array itself.

    The copy may still run: an array in pinned memory must stay as it is until then.
    """
    return torch.from_numpy(array).to(device, non_blocking=True)


def pin_to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The same of an array that may change at once: it is copied to pinned memory before.

    torch gives that memory to nobody else until the copy has run.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def copy_array(array: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Copy a host's array into a tensor of a device, by work on the current stream.

    The array may change at once; torch gives the memory that it is copied from to nobody else
    until the copy has run.
    """
    tensor = torch.from_numpy(array)
    if target.device.type == "cuda" and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    target.copy_(tensor, non_blocking=True)


def wait_for_device(device: torch.device) -> None:
    """Wait until all work launched on the current stream is done; a CPU launches nothing."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
