"""Powers of two by lanes: as processors with AVX512 compute them, and as others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
from numba.extending import intrinsic

from kvrelay.cpu_kernels import lanes
from kvrelay.cpu_kernels.pair_memory import FLOAT, address_of, load, pointer, store

Floats = npt.NDArray[np.float32]


def compile_powers() -> Callable[[Floats], None]:
    """Of an array of whole vectors, in place; not cached."""

    @intrinsic  # type: ignore[untyped-decorator]
    def raise_two(_typing: Any, address: Any, vectors: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            numbers = pointer(builder, args[0], FLOAT)

            def turn(index: Any, _: Sequence[Any]) -> Sequence[Any]:
                place = builder.mul(index, index.type(lanes.LANES))
                power = lanes.exp2(builder, load(builder, numbers, place, lanes.FLOATS))
                store(builder, power, numbers, place)
                return ()

            lanes.loop(builder, args[1], (), turn)
            return context.get_dummy_value()

        return numba.void(numba.int64, numba.int64), generate

    @numba.njit  # type: ignore[untyped-decorator]
    def powers(numbers: Floats) -> None:
        raise_two(address_of(numbers), len(numbers) // lanes.LANES)

    compiled: Callable[[Floats], None] = powers
    return compiled


@pytest.mark.parametrize("scaling", [True, False])
def test_powers_of_two(scaling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if scaling and not lanes.has_scaling():
        pytest.skip("this processor has no AVX512DQ")
    monkeypatch.setattr(lanes, "has_scaling", lambda: scaling)
    powers = compile_powers()
    numbers = np.linspace(-126, 0, 1 << 14, dtype=np.float32)
    exact = np.exp2(numbers.astype(np.float64))
    powers(numbers)
    assert np.max(np.abs(numbers / exact - 1)) < 3e-7
    special = np.zeros(lanes.LANES, np.float32)
    special[:6] = -np.inf, np.nan, -1e30, 0.0, -126.0, -127.5
    powers(special)
    assert special[[0, 2]].tolist() == [0.0, 0.0]
    assert np.isnan(special[1])
    assert special[3:5].tolist() == [1.0, 2.0**-126]
    assert 0 <= special[5] <= np.float32(2.0**-127.5)
