"""Dtypes and devices: their names, as people write them, made into torch's; and waiting."""

from __future__ import annotations

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
    """The torch device that `name` means on this machine."""
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
    return device


def wait_for_device(device: torch.device) -> None:
    """Return when all that was launched on the current stream is done; a CPU launches nothing."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
