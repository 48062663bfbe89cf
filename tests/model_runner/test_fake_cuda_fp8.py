"""FP8 on "cuda:0" without one: weights and KV stay in 8 bits, and what is loaded is there once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvrelay.model_runner.layers.fp8_linear import BlockScaledLinear, RowScaledLinear
from kvrelay.model_runner.runner import ModelRunner
from tests.model_runner.fake_cuda import DEVICE, fake_cuda
from tests.model_runner.fp8_models import FORMATS, write_fp8
from tests.model_runner.test_fake_cuda import run_on_device
from tests.model_runner.test_flashinfer_attention import use_double
from tests.model_runner.test_fp8_linear import made_products
from tests.model_runner.tiny_models import Models
from tests.pairwise import few

pytestmark = pytest.mark.usefixtures("guard")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    use_double(monkeypatch)


@few(2)
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "form", "product"),
    [
        *(("llama-wide", form, RowScaledLinear) for form in FORMATS if "block" not in form),
        *(("llama-wide", form, BlockScaledLinear) for form in FORMATS if "block" in form),
        ("deepseek-wide", "fp8-block", BlockScaledLinear),
        ("deepseek-wide", "compressed-tensor", RowScaledLinear),
    ],
)
def test_products_of_fp8_on_a_device(
    name: str,
    form: str,
    product: type,
    models: Models,
    tokens: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By torch's own checks of what `scaled_mm` of a GPU is given."""
    folder, _ = write_fp8(models.folder(name), FORMATS[form], tmp_path)
    made = made_products(monkeypatch)
    with fake_cuda(monkeypatch):
        run_on_device(folder, "flashinfer", tokens)
    # Of two layers: attention's products (a latent's are more) and two of the feed-forward.
    per_layer = {"llama-wide": 4, "deepseek-wide": 6}[name]
    assert made == [product.__name__] * 2 * per_layer


class FreedBytes(TorchDispatchMode):
    """Counts what was allocated on the fake device, and what of it is still in use."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._freed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device == DEVICE:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        known = self._seen.get(storage._cdata)
        if known is not None and not known[0].expired():
            return
        if known is not None:  # another at the same address
            self._freed += known[1]
        self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    @property
    def freed(self) -> int:
        return self._freed + sum(n for one, n in self._seen.values() if one.expired())

    @property
    def live(self) -> int:
        return sum(n for one, n in self._seen.values() if not one.expired())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fp8", [False, True])
def test_weights_are_loaded_without_a_second_copy(
    fp8: bool, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused products, too: their parts are read into their places."""
    form = FORMATS["compressed-channel"]
    folder = write_fp8(models.folder("llama-wide"), form, tmp_path)[0 if fp8 else 1]
    with fake_cuda(monkeypatch), FreedBytes() as counted:
        runner = ModelRunner(folder, "bfloat16", "cuda:0")
        live, freed = counted.live, counted.freed
    assert runner is not None
    weights = 2 * 7 * 256 * 256 * (1 if fp8 else 2)
    assert live > weights
    assert freed < weights / 20
