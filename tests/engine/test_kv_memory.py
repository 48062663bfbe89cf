"""How much KV a worker with a GPU has, if it is told a share of the GPU's memory."""

from __future__ import annotations

import shutil
import subprocess
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvrelay.engine.config import DEVICE_OPTIONS, Speculation, WorkerConfig
from kvrelay.engine.worker import gpu_turns
from kvrelay.engine.worker.device_defaults import with_device_defaults, with_gpu_defaults
from kvrelay.engine.worker.device_memory import MemoryUse
from kvrelay.engine.worker.gpu_turns import GpuTurns, nvml_free, taken_before
from kvrelay.engine.worker.loading import find_kv_memory, load_model
from kvrelay.kv_transfer.scratch_pages import PROBED_AT_ONCE, make_landing, make_scratch
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.runner import ModelRunner
from kvrelay.options.memory_share import MemoryShare
from kvrelay.wire.worker_info import WorkerRole
from tests.checkpoints import make_checkpoint

GIB = 1 << 30
AUTO = MemoryShare.auto()


class Gpu:
    """A GPU's memory, and an allocator that keeps what is freed, as torch's does."""

    def __init__(self, total: int, others: int) -> None:
        self._total = total
        self._others = others
        self._used = self._reserved = self._peak = 0
        self.steps = 0

    def allocate(self, nbytes: int) -> None:
        self._used += nbytes
        self._reserved = max(self._reserved, self._used)
        self._peak = max(self._peak, self._reserved)

    def free(self, nbytes: int) -> None:
        self._used -= nbytes

    def free_and_total(self) -> tuple[int, int]:
        return self._total - self._others - self._reserved, self._total

    def reserved(self) -> int:
        return self._reserved

    def peak(self) -> int:
        return self._peak

    def release_unused(self) -> None:
        self._reserved = self._peak = self._used


def test_kv_gets_what_weights_the_largest_step_and_others_leave() -> None:
    gpu = Gpu(total=80 * GIB, others=1 * GIB)
    gpu.allocate(20 * GIB)  # weights
    gpu.allocate(7 * GIB)
    gpu.free(7 * GIB)  # loading them took more for a while

    def largest_step() -> None:
        gpu.allocate(3 * GIB)
        gpu.free(2 * GIB)  # a library keeps the rest as its workspace
        gpu.allocate(GIB)
        gpu.free(GIB)

    use = MemoryUse.measure(gpu, largest_step)
    assert use == MemoryUse(total=80 * GIB, taken=22 * GIB, step=2 * GIB)
    left = use.left_for_kv(AUTO)
    assert left == int(0.9 * 80 * GIB) - 24 * GIB
    # With pools of that size the same step still fits into the share.
    gpu.allocate(left)
    gpu.allocate(2 * GIB)
    free, total = gpu.free_and_total()
    assert total - free == int(0.9 * total)


def test_what_a_measured_step_leaves_beside_the_pools_is_taken() -> None:
    """CUDA graphs: steps are measured beside them, and they are captured anew over the pools."""
    gpu = Gpu(total=80 * GIB, others=0)

    class Graphs:
        def __init__(self) -> None:
            gpu.allocate(3 * GIB)
            weakref.finalize(self, gpu.free, 3 * GIB)

    def largest_step() -> Graphs:
        graphs = Graphs()
        gpu.allocate(2 * GIB)
        gpu.free(2 * GIB)
        return graphs

    use = MemoryUse.measure(gpu, largest_step)
    assert use == MemoryUse(total=80 * GIB, taken=3 * GIB, step=2 * GIB)
    gpu.release_unused()
    assert gpu.reserved() == 0, "they were kept"


def test_kv_shares_what_is_left_with_scratch_that_grows_with_it() -> None:
    use = MemoryUse(total=100 * GIB, taken=20 * GIB, step=10 * GIB)
    assert use.left_for_kv(AUTO, beside=0.25) == 48 * GIB


@pytest.mark.parametrize("role", WorkerRole)
def test_what_transfers_allocate_later_is_left_to_them(
    role: WorkerRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's own pages, and those that it reads of some peers at once."""
    runner = ModelRunner(make_checkpoint(tmp_path / "llama"), "float32", "cpu")
    monkeypatch.setattr(runner, "run_largest", lambda *_: torch.zeros(1))
    config = replace(config_of(tmp_path, kv_memory=AUTO), role=role)
    left = find_kv_memory(config, runner, None, Gpu(GIB, 0))
    pool = KVPool(runner.make_geometries(config.page_size)[0], 2, torch.device("cpu"))
    agents = make_scratch(pool, "w")
    landings = [make_landing(agents) for _ in range(PROBED_AT_ONCE)]
    taken = sum(one.data.nbytes for one in (agents, *landings))
    assert taken > 1 << 20
    assert left == int(0.9 * GIB) - (0 if role is WorkerRole.AGGREGATED else taken)


def test_a_gpu_that_is_full_is_refused_with_what_takes_its_memory() -> None:
    gpu = Gpu(total=8 * GIB, others=0)
    gpu.allocate(7 * GIB)

    def largest_step() -> None:
        gpu.allocate(GIB)
        gpu.free(GIB)

    with pytest.raises(ValueError, match=r"^kv_memory: nothing is left .* 7\.00 GiB are taken, by"):
        MemoryUse.measure(gpu, largest_step).left_for_kv(AUTO)


def config_of(path: Path, **options: object) -> WorkerConfig:
    config = WorkerConfig("a0", WorkerRole.AGGREGATED, path, "tiny", dtype="float32")
    return replace(config, chunk_tokens=24, max_running=3, **options)  # type: ignore[arg-type]


def test_bytes_are_taken_as_they_are_and_nothing_is_measured(tmp_path: Path) -> None:
    runner = ModelRunner(make_checkpoint(tmp_path / "llama"), "float32", "cpu")
    gpu = Gpu(GIB, 0)
    assert find_kv_memory(config_of(tmp_path, kv_memory=5 << 20), runner, None, gpu) == 5 << 20


@pytest.mark.parametrize(
    ("speculation", "rows"), [(Speculation.NONE, 3), (Speculation.NGRAM, 3 * (1 + 4))]
)
def test_the_share_is_measured_with_the_largest_step(
    speculation: Speculation, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In which every request has all its drafts."""
    runner = ModelRunner(make_checkpoint(tmp_path / "llama"), "float32", "cpu")
    gpu, run_largest = Gpu(GIB, 0), runner.run_largest
    shapes: list[torch.Size] = []

    def run(*args: int) -> torch.Tensor:
        logits = run_largest(*args)
        gpu.allocate(logits.nbytes)
        weakref.finalize(logits, gpu.free, logits.nbytes)
        shapes.append(logits.shape)
        return logits

    def capture() -> np.ndarray:
        gpu.allocate(5 << 20)
        graphs = np.zeros(1)
        weakref.finalize(graphs, gpu.free, 5 << 20)
        return graphs

    monkeypatch.setattr(runner, "run_largest", run)
    monkeypatch.setattr(runner, "capture_on_scratch", capture)
    config = config_of(tmp_path, kv_memory=AUTO, speculation=speculation, num_draft_tokens=4)
    left = find_kv_memory(config, runner, None, gpu)
    assert shapes == [(24 + rows, runner.config.vocab_size)] * 2
    # Two steps are in flight, and graphs are there.
    assert left == int(0.9 * GIB) - 2 * shapes[0].numel() * 4 - (5 << 20)


@pytest.mark.parametrize("share", [AUTO, MemoryShare(0.4)])
def test_workers_that_share_a_gpu_measure_one_after_the_other(
    share: MemoryShare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets its part, also in place of one that died, whatever the others have."""
    runner = ModelRunner(make_checkpoint(tmp_path / "llama"), "float32", "cpu")
    monkeypatch.setattr(runner, "run_largest", lambda *_: torch.zeros(1))
    gpu = Gpu(total=80 * GIB, others=0)
    config = replace(config_of(tmp_path, kv_memory=share), gpu_part=0.5)
    expected = int((0.45 if share is AUTO else 0.4) * 80 * GIB) - 16 * GIB

    def start() -> int:
        free, total = gpu.free_and_total()
        gpu.allocate(16 * GIB)  # weights
        kv = find_kv_memory(config, runner, None, gpu, total - free)
        gpu.allocate(kv)
        return kv

    assert [start(), start()] == [expected] * 2
    gpu.free(16 * GIB + expected)
    gpu.release_unused()
    assert start() == expected


def test_a_part_of_a_gpu_that_others_have_taken_is_not_promised() -> None:
    use = MemoryUse(total=80 * GIB, taken=16 * GIB, step=GIB, others=50 * GIB)
    assert use.left_for_kv(MemoryShare(0.45)) == 13 * GIB
    full = replace(use, others=64 * GIB)
    with pytest.raises(ValueError, match=r"^kv_memory: .*; others have 64\.00 GiB$"):
        full.left_for_kv(MemoryShare(0.45))


def test_a_turn_at_a_gpu_ends_before_the_next_one_begins(tmp_path: Path) -> None:
    turns, began = [GpuTurns("GPU-1", tmp_path) for _ in range(2)], threading.Event()

    def take_turn() -> None:
        with turns[1].turn():
            began.set()

    other = threading.Thread(target=take_turn)
    with turns[0].turn():
        other.start()
        assert not began.wait(0.05)
        with GpuTurns("GPU-2", tmp_path).turn():
            pass  # another GPU's workers do not wait
    other.join(10)
    assert began.is_set()


def test_a_turn_that_cannot_be_had_says_what_to_do(tmp_path: Path) -> None:
    said = r"^worker_gpus: .* take turns by .*GPU-1, which cannot be written \(No such file"
    with pytest.raises(ValueError, match=said), GpuTurns("GPU-1", tmp_path / "none").turn():
        pass


NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strcmp(uuid, "MIG-1-2")) return 6;
    *device = (void *)7;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long memory[3]) {
    memory[0] = 8ULL << 30; memory[1] = 5ULL << 30; memory[2] = 2ULL << 30;
    return device == (void *)7 ? 0 : 2;
}
"""


def test_what_others_have_taken_is_measured_before_there_is_a_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a library in C with NVML's functions, which CUDA's own answer must not replace."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "nvml.c", tmp_path / "nvml.so"
    source.write_text(NVML)
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    assert nvml_free("1-2", str(library)) == 5 * GIB
    assert nvml_free("1-3", str(library)) is None
    assert nvml_free("1-2", str(tmp_path / "none.so")) is None
    properties, device = SimpleNamespace(uuid="1-2", total_memory=7 * GIB), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * GIB, 7 * GIB))
    assert taken_before(device) == 3 * GIB, "without NVML the context counts"
    monkeypatch.setattr(gpu_turns, "_NVML", str(library))
    assert taken_before(device) == 2 * GIB


@pytest.mark.parametrize(
    ("gibibytes", "part", "tokens"),
    [(16, 1.0, 2048), (79, 1.0, 4096), (79, 0.5, 2048), (140, 1.0, 8192), (140, 0.5, 4096)],
)
def test_what_nobody_gave_fits_the_gpu(gibibytes: int, part: float, tokens: int) -> None:
    left = replace(config_of(Path()), gpu_part=part, left_to_device=frozenset(DEVICE_OPTIONS))
    found = with_gpu_defaults(left, gibibytes * GIB)
    assert (found.kv_memory, found.max_running, found.chunk_tokens) == (AUTO, 256, tokens)
    assert found.left_to_device == set()
    given = replace(left, left_to_device=frozenset({"max_running"}))
    assert with_gpu_defaults(given, gibibytes * GIB).chunk_tokens == given.chunk_tokens


def test_a_cpu_s_defaults_stay() -> None:
    config = WorkerConfig("a0", WorkerRole.AGGREGATED, Path(), "tiny")
    on_cpu = with_device_defaults(replace(config, left_to_device=frozenset(DEVICE_OPTIONS)))
    assert on_cpu == config
    assert (config.kv_memory, config.max_running, config.chunk_tokens) == (512 << 20, 64, 512)


def test_a_share_of_a_cpus_memory_is_refused(tmp_path: Path) -> None:
    config = config_of(make_checkpoint(tmp_path / "llama"), kv_memory=MemoryShare(0.5))
    with pytest.raises(ValueError, match=r"^kv_memory: 0\.5 is a share of a GPU's memory; for a"):
        load_model(config)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "deepseek"])
def test_the_largest_step_leaves_bound_pools_alone(tmp_path: Path, architecture: str) -> None:
    runner = ModelRunner(make_checkpoint(tmp_path / architecture, architecture), "float32", "cpu")
    pools = [KVPool(one, 8, torch.device("cpu")) for one in runner.make_geometries(4)]
    runner.bind(pools)
    logits = runner.run_largest(chunk_tokens=20, rows=2, context=100)
    assert logits.shape == (22, runner.config.vocab_size)
    assert np.isfinite(logits.numpy()).all()
    assert not any(pool.data.any() for pool in pools)
    # Chunks may be of several prompts.
    assert runner.run_largest(chunk_tokens=500, rows=1, context=60).shape[0] == 501


@pytest.mark.parametrize(
    ("text", "part"),
    [("0.9", 0.9), ("0.85", 0.85), (".5", 0.5), ("85%", 0.85), ("100 %", 1.0), ("1.0", 1.0)],
)
def test_shares_as_people_write_them(text: str, part: float) -> None:
    assert MemoryShare.parse(text) == MemoryShare(part)


def test_a_share_that_somebody_has_chosen_is_not_auto() -> None:
    """Workers that share a GPU divide `auto` alone."""
    auto, chosen = MemoryShare.parse("auto"), MemoryShare.parse("90%")
    assert auto is not None
    assert chosen is not None
    assert (auto.part, auto.is_auto, chosen.part, chosen.is_auto) == (0.9, True, 0.9, False)


@pytest.mark.parametrize("text", ["512MiB", "1048576", "1.5GiB", "all", "-1%", "1"])
def test_what_is_no_share(text: str) -> None:
    assert MemoryShare.parse(text) is None


@pytest.mark.parametrize("text", ["0%", "0.0", "101%", "1.5"])
def test_shares_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="a share is more than 0 and at most 1"):
        MemoryShare.parse(text)


def test_a_share_is_shown_as_it_is_written() -> None:
    shares = (AUTO, MemoryShare(0.9), MemoryShare(0.85), MemoryShare(1.0))
    assert list(map(str, shares)) == ["auto", "0.9", "0.85", "1"]
