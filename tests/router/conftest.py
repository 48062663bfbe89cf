from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvrelay.router.config import PlacementMode, RouterConfig

from .cluster import Cluster, HeldEncoding, running
from .live_run import Run
from .toy_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return sentencepiece_tokenizer()


@pytest.fixture(scope="session")
def model_path(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def config(model_path: Path) -> RouterConfig:
    return RouterConfig(
        model_name="counter",
        model_path=model_path,
        dtype="float32",
        placement=PlacementMode.DISAGGREGATED,
        grpc_address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        default_max_tokens=16,
        max_live_requests=8,
        max_message_bytes=64 << 10,
        failover_wait=0.3,
        worker_wait=0.3,
        shutdown_grace_seconds=0.0,
    )


@pytest.fixture
def patient(config: RouterConfig) -> RouterConfig:
    """A router that waits for workers that are on their way."""
    return replace(config, failover_wait=60.0)


@pytest.fixture
async def cluster(config: RouterConfig) -> AsyncIterator[Cluster]:
    async with running(config, "prefill-0", "decode-0") as cluster:
        yield cluster


@pytest.fixture
async def pairs(config: RouterConfig) -> AsyncIterator[Cluster]:
    """Two decode workers that compute prompts, too."""
    adaptive = replace(config, placement=PlacementMode.ADAPTIVE)
    async with running(adaptive, "decode-0", "decode-1") as cluster:
        cluster.count()
        yield cluster


@pytest.fixture
def held_encoding(monkeypatch: pytest.MonkeyPatch) -> HeldEncoding:
    held = HeldEncoding()
    monkeypatch.setattr("kvrelay.router.admission.served_tokenizer.encode", held.encode)
    return held


@pytest.fixture
def run(tokenizer: Tokenizer) -> Run:
    return Run(tokenizer, seed=5)
