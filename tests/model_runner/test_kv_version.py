"""KV of this release, beside numbers that an earlier one has written: a page's name promises them.

`python -m tests.model_runner.test_kv_version` writes the numbers anew, once `_VERSION` is raised.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.model_runner.layers.product_choice import ProductWay
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.wire import page_hash
from tests.model_runner.product_units import UNITS, be_a_processor_of
from tests.model_runner.sequences import Sequences
from tests.model_runner.tiny_models import CONFIGS, save_random_model

NUMBERS: Final = Path(__file__).with_name("kv_of_this_version.json")
TOKENS: Final = [(37 * number + 5) % 131 for number in range(20)]
PROMPT: Final = 13
"""The tokens that are computed at once; each later one has a forward of its own."""
SHOWN: Final = (0, PROMPT - 1, len(TOKENS) - 1)
"""The tokens whose KV of the last layer is written down."""
MODELS: Final = ("llama", "qwen3", "gemma2", "deepseek-v3")
ROUNDING: Final = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 0.04}
"""The most that KV may differ, as a part of its largest number."""
WAYS: Final[list[tuple[str, str, dict[str, Any]]]] = [
    ("float64", "", {}),
    ("float32", "", {}),
    ("float32", "", {"batch_invariant": True}),
    *(("bfloat16", unit, {"cpu_kernels": ProductWay.OWN}) for unit in UNITS),
    ("bfloat16", "", {"cpu_kernels": ProductWay.ONEDNN}),
    *(("bfloat16", unit, {"batch_invariant": True}) for unit in UNITS),
]
"""The ways to compute KV on a CPU: dtype, the unit that multiplies, options."""


def make_model(name: str, folder: Path) -> Path:
    """A model whose weights follow from a formula, and from no generator of random numbers."""
    save_random_model(CONFIGS[name](), folder)
    path, begin = folder / "model.safetensors", 0
    weights = load_file(path)
    for key, weight in sorted(weights.items()):
        numbers = torch.arange(begin, begin + weight.numel(), dtype=torch.float64)
        begin += weight.numel()
        waves = torch.sin(numbers * 0.7071 + torch.sin(numbers * 0.013)).reshape(weight.shape)
        scale, middle = (0.1, 1.0) if weight.ndim == 1 else (0.25, 0.0)
        weights[key] = (middle + scale * waves).to(weight.dtype)
    save_file(weights, path, {"format": "pt"})
    return folder


def kv_of(runner: ModelRunner) -> list[list[float]]:
    """The KV of the last layer: of each shown token its numbers, in one row."""
    running = Sequences(runner, 1, len(TOKENS))
    running.forward({0: TOKENS[:PROMPT]})
    for token in TOKENS[PROMPT:]:
        running.forward({0: [token]})
    pools = zip(running.pools, running.page_tables, strict=True)
    pool, [table] = next(one for one in pools if one[0].geometry.window is None)
    size = pool.geometry.page_size
    pages = pool.layer(pool.geometry.num_layers - 1).double()
    return [pages[table[one // size], :, :, one % size].flatten().tolist() for one in SHOWN]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("versions")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "unit", "options"), WAYS)
def test_kv_is_what_pages_of_this_version_hold(
    name: str,
    dtype: str,
    unit: str,
    options: dict[str, Any],
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = json.loads(NUMBERS.read_text())
    assert written["version"] == page_hash._VERSION, "write the numbers of this version"
    if unit:
        be_a_processor_of(unit, monkeypatch)
    folder = folders / name
    if not folder.exists():
        make_model(name, folder)
    found = torch.tensor(kv_of(ModelRunner(folder, dtype, "cpu", **options)))
    expected = torch.tensor(written["kv"][name])
    apart = (found - expected).abs() / expected.abs().max()
    token, place = divmod(int(apart.argmax()), apart.shape[1])
    assert apart.max() <= ROUNDING[dtype], (
        f"{name}, token {SHOWN[token]}, number {place}: {found[token, place]:.5g}, where pages of "
        f"{page_hash._VERSION!r} hold {expected[token, place]:.5g}: raise _VERSION in "
        "wire/page_hash.py, or storage of an earlier release is read as if it were right"
    )


def write() -> None:
    """Write the numbers of this version."""
    with tempfile.TemporaryDirectory() as made:
        kv = {
            name: kv_of(ModelRunner(make_model(name, Path(made) / name), "float64", "cpu"))
            for name in MODELS
        }
    rounded = {name: [[round(one, 6) for one in row] for row in rows] for name, rows in kv.items()}
    text = json.dumps({"version": page_hash._VERSION, "kv": rounded})
    NUMBERS.write_text(text.replace("]], ", "]],\n").replace("], [", "],\n[") + "\n")


if __name__ == "__main__":
    write()
