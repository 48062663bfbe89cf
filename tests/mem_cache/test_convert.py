"""The bytes of the named pages arrive, and no others change, whatever the pools' layouts."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.device.cuda_streams import make_pinning
from kvrelay.mem_cache import convert
from kvrelay.mem_cache.convert import CopyPlan, copy_pages
from kvrelay.mem_cache.geometry import KVGeometry, PageOrder
from kvrelay.mem_cache.pinned_pools import PinnedPools
from kvrelay.mem_cache.pool import KVPool
from tests.known import known

CPU = torch.device("cpu")
NUM_LAYERS = 5
ATTENTION: dict[str, dict[str, Any]] = {
    # In bfloat16 pieces of 288 words: two blocks of the kernel and a part of a third.
    "mha": {"num_kv_heads": 6, "head_dim": 12, "page_size": 8},
    "gqa": {"num_kv_heads": 2, "head_dim": 8, "page_size": 4},
    "mla": {"num_kv_heads": 1, "head_dim": 36, "page_size": 4, "latent": True},
    # Pieces of 21 elements: at one byte each, no words of 8 bytes.
    "odd": {"num_kv_heads": 1, "head_dim": 7, "page_size": 3, "latent": True},
}
LAYERS = {
    "all": None,
    "one": range(3, 4),
    "some": range(0, NUM_LAYERS, 2),
    "back": range(4, 0, -3),
    "none": range(0),
}
SOURCE_PAGES, TARGET_PAGES = [6, 0, 3, 4, 3], [2, 9, 1, 0, 6]


def make_geometry(attention="gqa", dtype=torch.bfloat16):
    return KVGeometry(NUM_LAYERS, dtype=dtype, **ATTENTION[attention])


def make_pool(geometry, order, total_pages, device=CPU):
    """A pool of random bytes, the same for the same number of pages."""
    pool = KVPool(replace(geometry, order=order), total_pages, device)
    content = np.random.default_rng(total_pages).integers(256, size=pool.nbytes, dtype=np.uint8)
    pool.data.flatten().view(torch.uint8).copy_(torch.from_numpy(content))
    return pool


def bytes_of(pool):
    """``[layers, pages, bytes]`` of a pool, a copy on the CPU that no order shows in."""
    layers = [pool.layer(index).flatten(1) for index in range(pool.geometry.num_layers)]
    return torch.stack(layers).view(torch.uint8).cpu()


def check_copy(source, source_pages, target, target_pages, layers=None):
    """Copy, and compare every byte of both pools with what should be there."""
    unchanged, expected = bytes_of(source), bytes_of(target)
    for layer in range(NUM_LAYERS) if layers is None else layers:
        for read, written in zip(source_pages, target_pages, strict=True):
            expected[layer, written] = unchanged[layer, read]
    copy_pages(source, source_pages, target, target_pages, layers=layers)
    assert torch.equal(bytes_of(source), unchanged)
    assert torch.equal(bytes_of(target), expected)


def import_kernel(interpret, monkeypatch):
    """The kernel's module, a copy of its own: triton decides on import whether it interprets."""
    pytest.importorskip("triton", reason="triton is for Linux alone")
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpret else "0")
    spec = importlib.util.find_spec("kvrelay.mem_cache.convert_triton")
    module = importlib.util.module_from_spec(known(spec))
    known(known(spec).loader).exec_module(module)
    return module


@pytest.fixture(params=["cpu", "triton"])
def implementation(request, monkeypatch):
    """What copies on the CPU: its own code, or the kernel through Triton's interpreter."""
    if request.param == "triton":
        kernel = import_kernel(True, monkeypatch)
        monkeypatch.setattr(kernel, "BLOCK_WORDS", 128)
        monkeypatch.setattr(convert, "_HostPairs", partial(kernel.DevicePairs, CPU))


every_order = pytest.mark.parametrize(
    ("source_order", "target_order"), [(one, other) for one in PageOrder for other in PageOrder]
)


@every_order
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layers", LAYERS)
def test_copies_scattered_pages(
    implementation, source_order, target_order, attention, dtype, layers
):
    geometry = make_geometry(attention, dtype)
    source = make_pool(geometry, source_order, 7)
    target = make_pool(geometry, target_order, 10)
    check_copy(source, SOURCE_PAGES, target, TARGET_PAGES, LAYERS[layers])


@every_order
@pytest.mark.parametrize(
    ("source_pages", "target_pages"),
    [
        ([*range(20, 50)], [*range(35, 65)]),
        ([*range(20, 50)], [*range(30)][::-1]),
        ([*range(20, 50)], [*range(0, 60, 2)]),
        ([*range(40, 50), *range(3, 9)], [*range(9, 15), *range(60, 70)]),
        ([0, 1, 2, 3, 9, 4, 5, 6, 7], [5, 6, 7, 8, 0, 10, 11, 12, 13]),
        ([1, 2, 5], [0, 1, 4]),
        ([5, 0, 5, 7, 5, 0], [0, 9, 4, 1, 6, 3]),
    ],
    ids=["runs", "reversed", "every_other", "breaks_apart", "run_and_lone", "lone_and_run", "twos"],
)
def test_neighbours_are_copied_together(source_order, target_order, source_pages, target_pages):
    source = make_pool(make_geometry(), source_order, 70)
    check_copy(source, source_pages, make_pool(make_geometry(), target_order, 71), target_pages)


@every_order
@pytest.mark.parametrize("staged_pages", [0, 3, 5, 1000])
def test_staged_copy(monkeypatch, implementation, source_order, target_order, staged_pages):
    """What goes between devices, with the CPU as both."""
    geometry = make_geometry()
    monkeypatch.setattr(convert, "STAGED_BYTES", staged_pages * geometry.page_bytes)
    parts, on_one_device = [], convert._pairs_on

    def pairs_on(*arguments):
        parts.append(arguments)
        return on_one_device(*arguments)

    monkeypatch.setattr(convert, "_pairs_on", pairs_on)
    monkeypatch.setattr(convert, "_pairs_between", convert._StagedPairs)
    source = make_pool(geometry, source_order, 7)
    check_copy(source, SOURCE_PAGES, make_pool(geometry, target_order, 10), TARGET_PAGES)
    gathers_and_scatters = 2 * -(-len(SOURCE_PAGES) // max(1, staged_pages))
    assert len(parts) == gathers_and_scatters


@pytest.mark.parametrize("layers", ["all", "one"])
@pytest.mark.parametrize(
    ("source_pages", "target_pages"),
    [(SOURCE_PAGES, TARGET_PAGES), ([2, 3, 4, 6, 5], [5, 6, 7, 1, 0]), ([], [])],
    ids=["scattered", "runs", "none"],
)
def test_whole_pages_between_a_gpu_and_pinned_memory(
    monkeypatch, layers, source_pages, target_pages
):
    """A transfer for each page or run, with the CPU as both; a part of a page is staged."""
    staged, geometry = [], make_geometry()
    monkeypatch.setattr(convert, "_moves_by_dma", lambda *_: True)

    class Staged(convert._StagedPairs):
        def copy(self, *arguments):
            staged.append(arguments)
            super().copy(*arguments)

    monkeypatch.setattr(convert, "_pairs_between", Staged)
    source = make_pool(geometry, PageOrder.PAGE_FIRST, 7)
    target = make_pool(geometry, PageOrder.PAGE_FIRST, 10)
    check_copy(source, source_pages, target, target_pages, LAYERS[layers])
    assert bool(staged) is (layers == "one")


def test_what_goes_by_whole_pages():
    """Not between hosts, nor from memory that is not pinned."""
    pools = [make_pool(make_geometry(), order, 7) for order in PageOrder]
    assert not any(convert._moves_by_dma(one, other) for one in pools for other in pools)


@every_order
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
def test_plan_copies_layer_by_layer_and_again(
    monkeypatch, implementation, source_order, target_order, staged
):
    """Each copy takes the bytes of that moment to the layers that it names, and checks nothing."""
    geometry = make_geometry()
    source, target = make_pool(geometry, source_order, 7), make_pool(geometry, target_order, 10)
    if staged:
        monkeypatch.setattr(convert, "_pairs_between", convert._StagedPairs)
        monkeypatch.setattr(convert, "STAGED_BYTES", 2 * geometry.layer_page_bytes)
    read, written = SOURCE_PAGES.copy(), TARGET_PAGES.copy()
    plan = CopyPlan(source, read, target, written)
    read[:] = written[:] = [0] * len(read)  # the plan has its own
    monkeypatch.delattr(convert, "_checked_pages")
    monkeypatch.delattr(convert, "_check_pairs")
    for content in range(2):
        source.data.flatten().view(torch.uint8).add_(content)
        expected = bytes_of(target)
        for layers in [range(1), range(2, NUM_LAYERS), range(1, 2)]:
            for layer in layers:
                expected[layer, TARGET_PAGES] = bytes_of(source)[layer, SOURCE_PAGES]
            plan.copy(layers)
            assert torch.equal(bytes_of(target), expected)
    source.data.zero_()
    plan.copy()
    expected[:, TARGET_PAGES] = 0
    assert torch.equal(bytes_of(target), expected)


def test_plan_refuses_wrong_pages_before_and_wrong_layers_while_copying():
    source = make_pool(make_geometry(), PageOrder.LAYER_FIRST, 7)
    target = make_pool(make_geometry(), PageOrder.PAGE_FIRST, 10)
    with pytest.raises(ValueError, match="source_pages names page 7"):
        CopyPlan(source, [0, 7], target, [0, 1])
    plan = CopyPlan(source, SOURCE_PAGES, target, TARGET_PAGES)
    before = bytes_of(target)
    with pytest.raises(ValueError, match="layers"):
        plan.copy(range(3, NUM_LAYERS + 1))
    assert torch.equal(bytes_of(target), before)
    plan.copy(range(3, NUM_LAYERS))
    before[3:, TARGET_PAGES] = bytes_of(source)[3:, SOURCE_PAGES]
    assert torch.equal(bytes_of(target), before)


@pytest.mark.parametrize("order", list(PageOrder))
def test_pages_move_within_a_pool(order):
    pool = make_pool(make_geometry(), order, 10)
    before = bytes_of(pool)
    copy_pages(pool, [8, 1], pool, [0, 5])
    after = before.clone()
    after[:, [0, 5]] = before[:, [8, 1]]
    assert torch.equal(bytes_of(pool), after)


@every_order
def test_there_and_back(source_order, target_order):
    pool = make_pool(make_geometry(), source_order, 7)
    other = make_pool(make_geometry(), target_order, 7)
    before = bytes_of(pool)
    copy_pages(pool, range(7), other, [3, 1, 0, 6, 5, 2, 4])
    pool.data.zero_()
    copy_pages(other, [3, 1, 0, 6, 5, 2, 4], pool, range(7))
    assert torch.equal(bytes_of(pool), before)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_page_ids_of_any_whole_number(dtype):
    source = make_pool(make_geometry(), PageOrder.LAYER_FIRST, 7)
    target = make_pool(make_geometry(), PageOrder.PAGE_FIRST, 10)
    check_copy(source, np.array(SOURCE_PAGES, dtype), target, np.array(TARGET_PAGES, dtype))


def test_no_pages_is_no_fault(implementation):
    pool = make_pool(make_geometry(), PageOrder.PAGE_FIRST, 4)
    check_copy(pool, [], make_pool(make_geometry(), PageOrder.LAYER_FIRST, 4), [])


@pytest.mark.parametrize(
    ("source_pages", "target_pages", "layers", "message"),
    [
        ([0, 1], [0], None, "2 source_pages cannot go to 1 target_pages"),
        ([7], [0], None, "source_pages names page 7"),
        ([0, -1], [0, 1], None, "source_pages names page -1"),
        ([0], [10], None, "target_pages names page 10"),
        ([0, 1], [4, -5], None, "target_pages names page -5"),
        ([0, 1, 2], [4, 5, 4], None, r"target_pages names twice: \[4\]"),
        ([0.0], [0], None, "source_pages must be a flat list of page ids"),
        ([[0]], [0], None, "source_pages must be a flat list of page ids"),
        ([0, 1], [True, False], None, "target_pages must be a flat list of page ids"),
        ([0], [0], range(NUM_LAYERS + 1), "layers"),
        ([0], [0], range(-1, 2), "layers"),
        ([0], [0], range(2, -2, -1), "layers"),
    ],
)
def test_broken_request_changes_nothing(source_pages, target_pages, layers, message):
    source = make_pool(make_geometry(), PageOrder.LAYER_FIRST, 7)
    target = make_pool(make_geometry(), PageOrder.PAGE_FIRST, 10)
    before = bytes_of(target)
    with pytest.raises(ValueError, match=message):
        copy_pages(source, source_pages, target, target_pages, layers=layers)
    assert torch.equal(bytes_of(target), before)


def test_page_read_and_written_in_one_pool_is_refused():
    pool = make_pool(make_geometry(), PageOrder.PAGE_FIRST, 7)
    with pytest.raises(ValueError, match=r"target_pages and source_pages of one pool share \[3\]"):
        copy_pages(pool, [1, 3], pool, [3, 2])


@pytest.mark.parametrize(
    "other",
    [
        {"num_layers": 6},
        {"num_kv_heads": 4},
        {"head_dim": 16},
        {"page_size": 8},
        {"dtype": torch.float16},
        {"window": 64},
        {"num_kv_heads": 1, "latent": True},
    ],
    ids=lambda other: "-".join(other),
)
def test_other_geometry_is_refused(other):
    geometry = make_geometry()
    source = make_pool(geometry, PageOrder.PAGE_FIRST, 2)
    target = make_pool(replace(geometry, **other), PageOrder.LAYER_FIRST, 2)
    with pytest.raises(ValueError, match="target differs from source in more than the page order"):
        copy_pages(source, [0], target, [0])


@pytest.mark.parametrize("word", ["i64", "u8"])
def test_kernel_compiles_for_a_gpu(monkeypatch, tmp_path, word):
    """The interpreter lets pass what the compiler refuses; compiling needs no GPU."""
    kernel = import_kernel(False, monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, triton 3.9 warns
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    function = kernel._copy_pieces
    types = {"source": f"*{word}", "target": f"*{word}", "block_words": "constexpr"}
    types |= {"source_pages": "*i64", "target_pages": "*i64"}
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    constants = {"block_words": kernel.BLOCK_WORDS}
    source = compiler.ASTSource(function, signature, constants)
    program = compiler.compile(source, GPUTarget("cuda", 80, 32))
    assert "st.global" in program.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@every_order
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", ["all", "one"])
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_copies_to_and_from_a_gpu(
    monkeypatch, source_order, target_order, attention, dtype, layers, devices
):
    geometry = make_geometry(attention, dtype)
    monkeypatch.setattr(convert, "STAGED_BYTES", 3 * geometry.page_bytes)
    source_device, target_device = (torch.device(device) for device in devices)
    source = make_pool(geometry, source_order, 7, source_device)
    target = make_pool(geometry, target_order, 10, target_device)
    check_copy(source, SOURCE_PAGES, target, TARGET_PAGES, LAYERS[layers])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("to_host", [False, True])
def test_pinned_pages_to_and_from_a_gpu(monkeypatch, to_host):
    monkeypatch.setattr(convert, "DMA_BYTES", 0)
    monkeypatch.setattr(convert, "_StagedPairs", lambda *_: None)
    gpu, geometry = torch.device("cuda", 0), make_geometry()
    host = make_pool(geometry, PageOrder.PAGE_FIRST, 7)
    device = make_pool(geometry, PageOrder.PAGE_FIRST, 10, gpu)
    pinned = PinnedPools([host], make_pinning(gpu))
    if to_host:
        check_copy(device, SOURCE_PAGES, host, [2, 4, 1, 0, 6])
    else:
        check_copy(host, SOURCE_PAGES, device, TARGET_PAGES)
    pinned.close()
