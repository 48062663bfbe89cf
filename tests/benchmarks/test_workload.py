from __future__ import annotations

from itertools import pairwise

import pytest

from kvrelay.deploy.load_generator.trace import BLOCK_TOKENS, TraceRow
from kvrelay.deploy.load_generator.workload import (
    ClosedLoop,
    Job,
    Poisson,
    Prompts,
    Replay,
    Shape,
    WorkloadError,
    check_lengths,
    fixed_workloads,
    schedule,
    trace_jobs,
    trace_workloads,
)
from tests.known import known

SHAPES = (Shape(8, 4), Shape(16, 2))


def test_the_same_seed_gives_the_same_requests():
    first, second = (fixed_workloads(SHAPES, [Poisson(3.0)], 20, seed=7) for _ in range(2))
    assert first == second
    for one, other in zip(first, second, strict=True):
        prompts, again = Prompts(1000, one.seed), Prompts(1000, other.seed)
        assert [prompts.token_ids(j) for j in one.jobs] == [again.token_ids(j) for j in other.jobs]


def test_another_seed_run_or_job_or_warm_up_gives_other_prompts():
    runs = [
        *fixed_workloads([Shape(32, 1)], [ClosedLoop(1), ClosedLoop(2)], 4, seed=0),
        *fixed_workloads([Shape(32, 1)], [ClosedLoop(1)], 4, seed=1),
    ]
    prompts = [
        tuple(Prompts(50_000, run.seed, warm_up).token_ids(job))
        for run in runs
        for warm_up in (False, True)
        for job in run.jobs
    ]
    assert len(set(prompts)) == len(prompts) == 24


def test_prompts_have_their_length_and_stay_in_the_vocabulary():
    ids = Prompts(3, (0,)).token_ids(Job(0, 200, 1))
    assert len(ids) == 200
    assert set(ids) == {0, 1, 2}


def test_prompts_share_the_tokens_of_shared_blocks_only():
    prompts = Prompts(50_000, (0, 0))
    one = prompts.token_ids(Job(0, BLOCK_TOKENS + 10, 1, blocks=(5, 6)))
    other = prompts.token_ids(Job(1, BLOCK_TOKENS + 20, 1, blocks=(5, 7)))
    assert (len(one), len(other)) == (BLOCK_TOKENS + 10, BLOCK_TOKENS + 20)
    assert one[:BLOCK_TOKENS] == other[:BLOCK_TOKENS]
    assert one[BLOCK_TOKENS:] != other[BLOCK_TOKENS:][:10]


def test_every_shape_meets_every_load_with_requests_that_scale():
    runs = fixed_workloads(SHAPES, [ClosedLoop(1), ClosedLoop(32)], None, seed=0)
    assert [(run.name, str(run.load), len(run.jobs)) for run in runs] == [
        ("8/4", "concurrency 1", 8),
        ("8/4", "concurrency 32", 128),
        ("16/2", "concurrency 1", 8),
        ("16/2", "concurrency 32", 128),
    ]
    assert all(job.due is None for run in runs for job in run.jobs)


def test_poisson_arrivals_start_at_once_and_keep_the_rate():
    (run,) = fixed_workloads([Shape(1, 1)], [Poisson(10.0)], 4000, seed=0)
    due = [known(job.due) for job in run.jobs]
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert due[0] == 0
    assert min(gaps) >= 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.01, rel=0.15)


def test_replay_scales_the_trace_and_a_closed_loop_drops_its_times():
    jobs = trace_jobs([TraceRow(102.0, 9, 3), TraceRow(100.0, 5, 2)])
    assert [(job.due, job.input_len) for job in jobs] == [(0.0, 5), (2.0, 9)]
    assert [job.due for job in schedule(jobs, Replay(0.5), (0,))] == [0.0, 1.0]
    assert [job.due for job in schedule(jobs, ClosedLoop(1), (0,))] == [None, None]


def test_trace_lengths_are_capped_on_demand():
    (job,) = trace_jobs([TraceRow(0.0, 900, 300, (1, 2))], max_input_len=100, max_output_len=7)
    assert (job.input_len, job.output_len) == (100, 7)
    assert len(Prompts(10, (0,)).token_ids(job)) == 100


def test_a_trace_workload_is_the_head_of_the_trace():
    jobs = trace_jobs([TraceRow(float(at), 5, 2) for at in range(50)])
    first, second = trace_workloads("t", jobs, [ClosedLoop(1), ClosedLoop(5)], None, seed=0)
    assert (len(first.jobs), len(second.jobs)) == (8, 20)
    assert first.seed != second.seed


@pytest.mark.parametrize("text", ["256", "256/", "a/b", "1/2/3", "0/5", "-1/5", ""])
def test_a_bad_shape_is_refused(text):
    with pytest.raises(WorkloadError, match="shape"):
        Shape.parse(text)


def test_requests_beyond_the_model_are_refused_before_any_is_sent():
    (run,) = fixed_workloads([Shape(60, 5)], [ClosedLoop(1)], 3, seed=0)
    check_lengths(run, 65)
    with pytest.raises(WorkloadError, match="3 of 3 requests of 60/5"):
        check_lengths(run, 64)


def test_a_server_without_a_vocabulary_is_refused():
    with pytest.raises(WorkloadError, match="vocabulary"):
        Prompts(0, (0,))
