"""A CUDA device without one: tensors on "cuda:0" that have everything but contents.

torch's `FakeTensorMode` computes shapes, dtypes and devices, and fails where tensors of two devices
meet. On a build of torch for CPUs copies between devices need one thing more: a device guard, here
one that does nothing.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from kvrelay.device.device_streams import PASSED, NoStaging
from kvrelay.model_runner import runner as runner_module
from kvrelay.model_runner.attention.flashinfer_attention import FlashInfer
from kvrelay.model_runner.checkpoint import checkpoint as checkpoint_module
from kvrelay.model_runner.checkpoint.digest import WeightsDigest
from kvrelay.model_runner.layers.experts import sliced_experts

DEVICE = torch.device("cuda", 0)
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>) }
"""


def load_guard(folder: Path) -> None:
    """Compile the device guard into `folder` and load it, for the rest of the process."""
    if torch.cuda.is_available():
        pytest.skip("this torch has a real device guard")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    torch_folder = Path(torch.__file__).parent
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_GUARD)
    command: list[str | Path] = [compiler, "-std=c++20", "-fPIC", "-shared", source, "-o", library]
    command += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
    subprocess.run(command, check=True)
    torch.ops.load_library(library)


@contextmanager
def fake_cuda(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it every new tensor is fake, also one that is read from a file or from numpy.

    What is launched is done at once; what FlashInfer plans with stays real.
    """
    patch.setattr(runner_module, "parse_device", torch.device)
    patch.setattr(runner_module, "wait_for_device", lambda _: None)
    patch.setattr(runner_module, "record_event", lambda _: PASSED)
    patch.setattr(runner_module, "make_staging", lambda _: NoStaging())
    patch.setattr(checkpoint_module, "safe_open", _RealFile)
    patch.setattr(WeightsDigest, "add", lambda *_: None)  # there are no contents
    for name in ("to_host", "as_tensor"):
        patch.setattr(FlashInfer, name, _to_host)
    # Fake tensors know no inference mode, and ask torch itself whether it is on.
    patch.setattr(runner_module, "torch", _torch_but(inference_mode=torch.no_grad))
    # Which experts the tokens chose is not known: the first one all.
    patch.setattr(sliced_experts, "count_rows", lambda chosen, _: [chosen.numel()])
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _torch_but(**others: object) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(torch), **others})


def _to_host(_: FlashInfer, array: np.ndarray[Any, Any]) -> torch.Tensor:
    with unset_fake_temporarily():
        return torch.from_numpy(array)


class _RealFile:
    """`safe_open`, whose tensors have contents until they are put on the device."""

    def __init__(self, path: Path, framework: str) -> None:
        self._file = safe_open(path, framework=framework)

    def __enter__(self) -> _RealFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        with unset_fake_temporarily():
            tensor: torch.Tensor = self._file.get_tensor(name)
            return tensor.clone()
