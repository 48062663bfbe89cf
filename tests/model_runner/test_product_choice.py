"""The fastest way to multiply is taken, by the times that one process of a machine has measured."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
import torch

from kvrelay.cpu_kernels import kernel_cache
from kvrelay.cpu_kernels.processor import HIDE_FEATURES, cpu_features
from kvrelay.model_runner.layers.linear import (
    LinearFactory,
    PackedLinear,
    PanelLinear,
    PlainLinear,
)
from kvrelay.model_runner.layers.product_choice import ProductChoice, ProductWay, measured_ways

OWN, ONEDNN = ProductWay.OWN, ProductWay.ONEDNN
SHAPE = (256, 256)


class Clock:
    """Seconds that pass as products are made."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Product:
    """A way that takes so many seconds a row, and counts how often it was made."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.made = 0

    def __call__(self, weight: torch.Tensor, _bias: None) -> Callable[[torch.Tensor], torch.Tensor]:
        self.made += 1

        def multiply(x: torch.Tensor) -> torch.Tensor:
            self._clock.now += self._seconds * len(x)
            return x @ weight.T

        return multiply


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ways(clock: Clock, own: float, onednn: float) -> dict[ProductWay, Product]:
    return {OWN: Product(clock, own), ONEDNN: Product(clock, onednn)}


@pytest.mark.parametrize(
    ("own", "onednn", "fastest"), [(1e-5, 1e-4, OWN), (1e-4, 1e-5, ONEDNN), (1e-4, 0.95e-4, OWN)]
)
def test_the_fastest_is_taken_and_the_first_where_they_are_alike(
    own: float, onednn: float, fastest: ProductWay, tmp_path: Path, clock: Clock
) -> None:
    found = ways(clock, own, onednn)
    assert ProductChoice(1, tmp_path, clock).find(SHAPE, found) is fastest


def test_the_next_process_reads_what_the_first_has_measured(tmp_path: Path, clock: Clock) -> None:
    measured = ways(clock, 1e-4, 1e-5)
    assert ProductChoice(1, tmp_path, clock).find(SHAPE, measured) is ONEDNN
    read = ways(clock, 1e-5, 1e-4)
    assert ProductChoice(1, tmp_path, clock).find(SHAPE, read) is ONEDNN
    assert [one.made for one in read.values()] == [0, 0]
    assert ProductChoice(2, tmp_path, clock).find(SHAPE, read) is OWN, "other threads, another row"
    table = tmp_path / "products.json"
    other = {"another machine, 1 threads, 256 x 256": {"own": 1.0}}
    told = json.loads(table.read_text())
    untimed: dict[str, object] = {row.replace("256 x 256", "8 x 8"): {} for row in told}
    table.write_text(json.dumps(told | other | untimed))
    shown = {"1 threads, 256 x 256": ONEDNN, "2 threads, 256 x 256": OWN}
    assert measured_ways(tmp_path) == shown


def test_a_process_that_is_stopped_while_it_measures_keeps_no_other_waiting_for_ever(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "LONGEST_WAIT_SECONDS", 0.05)
    with (tmp_path / "products.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = ways(clock, 1e-4, 1e-5)
        assert ProductChoice(1, tmp_path, clock).find(SHAPE, found) is ONEDNN


@pytest.mark.parametrize("left", ["", "{", "[]", '{"a": 1}'])
def test_a_table_that_cannot_be_read_is_made_anew(left: str, tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "products.json").write_text(left)
    assert ProductChoice(1, tmp_path, clock).find(SHAPE, ways(clock, 1e-4, 1e-5)) is ONEDNN
    table = json.loads((tmp_path / "products.json").read_text())
    assert [row.endswith(", 256 x 256") for row in table].count(True) == 1


def test_timing_ends_when_its_time_is_spent(tmp_path: Path, clock: Clock) -> None:
    choice = ProductChoice(1, tmp_path, clock)
    assert choice.find(SHAPE, ways(clock, 1.0, 0.1)) is ONEDNN
    assert choice.find((512, 256), ways(clock, 1.0, 0.1)) is OWN


def test_small_weights_are_not_timed(tmp_path: Path, clock: Clock) -> None:
    found = ways(clock, 1e-4, 1e-5)
    assert ProductChoice(1, tmp_path, clock).find((16, 16), found) is OWN
    assert [one.made for one in found.values()] == [0, 0]


@pytest.mark.parametrize("wanted", ["own", "onednn"])
def test_an_option_says_which(wanted: str) -> None:
    weight = torch.randn(256, 256).bfloat16()
    if not (PanelLinear.supports(weight) and PackedLinear.supports(weight)):
        pytest.skip("this processor has no two ways")
    kind = type(LinearFactory(cpu_kernels=wanted).make(weight))
    assert kind is (PanelLinear if wanted == "own" else PackedLinear)
    assert type(LinearFactory(cpu_kernels=wanted).make(weight.float())) is PlainLinear


def test_hidden_features_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    name = min(cpu_features())
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)
    monkeypatch.setenv(HIDE_FEATURES, f"{os.environ.get(HIDE_FEATURES, '')},{name}")
    assert cpu_features.__wrapped__() == cpu_features() - {name}
    assert f"-{name}" in numba.config.CPU_FEATURES.split(",")
    monkeypatch.setenv(HIDE_FEATURES, "avx1024")
    with pytest.raises(ValueError, match=f"{HIDE_FEATURES}: .*'avx1024'"):
        cpu_features.__wrapped__()
