"""Bounds on a request come from the model and the largest pools of the workers."""

from __future__ import annotations

import pytest

from kvrelay.router.errors import Unavailable
from kvrelay.router.placement.limits import RequestLimits
from kvrelay.wire.worker_info import WorkerInfo, WorkerRole
from tests.worker_infos import worker_info


def endpoint(role: WorkerRole, pool_tokens: int, max_model_len: int = 64) -> WorkerInfo:
    return worker_info(
        f"{role}-0", pool_tokens=pool_tokens, max_model_len=max_model_len, vocab_size=100
    )


def test_limits_are_the_models_and_the_largest_pools() -> None:
    limits = RequestLimits.of(
        [
            endpoint(WorkerRole.PREFILL, 10, max_model_len=32),
            endpoint(WorkerRole.PREFILL, 30),
            endpoint(WorkerRole.DECODE, 20),
        ]
    )
    assert limits == RequestLimits(100, 32, 30, 20)


def test_without_one_role_there_are_no_limits() -> None:
    with pytest.raises(Unavailable, match="decode"):
        RequestLimits.of([endpoint(WorkerRole.PREFILL, 10)])


def test_aggregated_workers_compute_prompts_and_outputs_in_one_pool() -> None:
    aggregated = endpoint(WorkerRole.AGGREGATED, 20)
    assert RequestLimits.of([aggregated]) == RequestLimits(100, 64, 20, 20)
    assert RequestLimits.of([aggregated, endpoint(WorkerRole.PREFILL, 30)]) == RequestLimits(
        100, 64, 20, 20
    )


@pytest.mark.parametrize(("decode", "expected"), [(20, (30, 20)), (19, (20, 20))])
def test_limits_of_both_kinds_are_of_one_that_can_take_all(
    decode: int, expected: tuple[int, int]
) -> None:
    pair = [endpoint(WorkerRole.PREFILL, 30), endpoint(WorkerRole.DECODE, decode)]
    limits = RequestLimits.of([*pair, endpoint(WorkerRole.AGGREGATED, 20)])
    assert (limits.prefill_pool_tokens, limits.decode_pool_tokens) == expected


@pytest.mark.parametrize(("model", "prefill", "decode"), [(64, 10, 20), (64, 20, 10), (10, 20, 30)])
def test_prompt_and_output_fit_the_model_and_a_worker_of_either_role(
    model: int, prefill: int, decode: int
) -> None:
    assert RequestLimits(100, model, prefill, decode).most_tokens == 10
