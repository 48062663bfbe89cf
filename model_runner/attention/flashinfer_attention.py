"""Attention on CUDA devices by FlashInfer's kernels, which read a pool's pages in place.

The only file that imports flashinfer, and only when this backend is chosen.

A step and pool is planned once, for all of the pool's layers, from arrays on the host; a
layer then only launches kernels. Steps in which each sequence brings one token run the decode
kernels, all others (prompts, drafts to be verified, and tokens beside them) the prefill
kernels. Latents (MLA) have kernels of their own for both.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, Protocol

import torch

from kvrelay.mem_cache.geometry import KVGeometry
from kvrelay.mem_cache.pool import KVPool
from kvrelay.model_runner.attention.flashinfer_compiler import compiler_lacks, offer_own_ninja
from kvrelay.model_runner.attention.new_tokens import NewTokens
from kvrelay.model_runner.attention.paged_plan import PagedPlan, plan_pages
from kvrelay.model_runner.batch import ForwardBatch, Int32Array
from kvrelay.model_runner.config.query_heads import QueryHeads
from kvrelay.model_runner.errors import UnsupportedOptionError

WORKSPACE_BYTES: Final = 128 << 20
"""Of partial results on the device, shared by all wrappers: as FlashInfer recommends."""
WRAPPER_BYTES: Final = 8 << 20
"""That each wrapper allocates on the device for its plan, and as much pinned on the host."""
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
"""That both generations of prefill kernels have."""
LATENT_MULTIPLE, ROTARY_MULTIPLE = 128, 64
"""Of the dimensions of a latent and of its rotary key."""
CUDA_CORE_GROUPS = (1, 2, 3)
"""Query heads a KV head that the decode kernels without tensor cores compute. They have 4, 6, 8
and 16, too, where tensor cores are faster; 5 and 7 they have not."""
MAX_PAGE_STRIDE = 2**32
"""Elements between two pages of a layer: kernels count them in 32 bits."""
_LEAST_CAPABILITY: Final = (8, 0)


class Wrapper(Protocol):
    """FlashInfer's wrapper of one kind of kernel."""

    def plan(self, *args: Any, **options: Any) -> None:
        """Divide the work of the layers to come; arrays on the host."""
        ...

    def run(self, *args: Any, **options: Any) -> torch.Tensor:
        """Launch the kernels of one layer, as planned."""
        ...


def flashinfer_lacks(geometry: KVGeometry, heads: QueryHeads) -> str | None:
    """What FlashInfer's kernels have not of this model, in a few words; None if they have all."""
    if geometry.dtype not in DTYPES:
        return f"dtype {str(geometry.dtype).removeprefix('torch.')}"
    if geometry.latent:
        rotary = geometry.head_dim - heads.value_dim
        if heads.value_dim % LATENT_MULTIPLE or rotary % ROTARY_MULTIPLE or not rotary:
            return f"latents of {heads.value_dim} and {rotary} dimensions"
        if geometry.window is not None or heads.softcap is not None:
            return "windows or soft caps over latents"
    elif geometry.head_dim not in HEAD_DIMS:
        return f"heads of {geometry.head_dim} dimensions"
    return None


def import_flashinfer(device: torch.device) -> Any:
    """The package.

    Raises:
        UnsupportedOptionError: it is not installed, it could not compile its kernels, or
            `device` is no GPU that it supports.
    """
    if device.type != "cuda":
        raise UnsupportedOptionError(
            f"--attention flashinfer needs a CUDA device, not {device.type}"
        )
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise UnsupportedOptionError("--attention flashinfer needs a GPU of sm_80 or later")
    offer_own_ninja()
    try:
        package = importlib.import_module("flashinfer")
    # RuntimeError: packages of compiled kernels that are of another version.
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedOptionError(
            f"--attention flashinfer: the package is not usable here ({error}): "
            "pip install 'kvrelay[cuda]'"
        ) from error
    if lack := compiler_lacks():
        raise UnsupportedOptionError(f"--attention flashinfer cannot compile its kernels: {lack}")
    return package


class FlashInfer:
    """The package with its workspace for one model on one device, allocated before pools are.

    Wrappers that run one after the other on one stream share the workspace.

    Raises:
        UnsupportedOptionError: as `import_flashinfer`.
    """

    def __init__(self, device: torch.device) -> None:
        self._package = import_flashinfer(device)
        self._device = device
        # Zeroed: the decode kernels expect it.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[int | None, tuple[Wrapper, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Device memory that is taken, by the workspace and the wrappers so far."""
        return WORKSPACE_BYTES + WRAPPER_BYTES * sum(map(len, self._wrappers.values()))

    def wrappers(self, geometry: KVGeometry, heads: QueryHeads) -> tuple[Wrapper, ...]:
        """Those of a model's pools with this window, made once: for latents, or prefill, decode."""
        if geometry.window not in self._wrappers:
            make = self._make_latent if geometry.latent else self._make_grouped
            self._wrappers[geometry.window] = make(geometry, heads)
        return self._wrappers[geometry.window]

    def csr_metadata(self, *arrays: torch.Tensor) -> object:
        """How the latents' wrapper takes its arrays."""
        return self._package.mla.MLAPlanMetadata.csr(*arrays)

    def to_host(self, array: Int32Array) -> torch.Tensor:
        """`array` whence copies to the device need not be waited for: in pinned memory."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if torch.cuda.is_available() else tensor

    def _make_latent(self, _geometry: KVGeometry, _heads: QueryHeads) -> tuple[Wrapper, ...]:
        # fa2 runs from sm_80 on and reads latents in place, whatever the page's size.
        return (self._package.mla.BatchMLAPagedAttentionWrapper(self._workspace, backend="fa2"),)

    def _make_grouped(self, geometry: KVGeometry, heads: QueryHeads) -> tuple[Wrapper, ...]:
        group = heads.num_heads // geometry.num_kv_heads
        package, space = self._package, self._workspace
        decode = package.BatchDecodeWithPagedKVCacheWrapper(
            space, kv_layout="HND", use_tensor_cores=group not in CUDA_CORE_GROUPS
        )
        return (package.BatchPrefillWithPagedKVCacheWrapper(space, kv_layout="HND"), decode)


class FlashInferAttention:
    """The `AttentionBackend` of CUDA devices. A plan counts until the next one is made.

    Args:
        flashinfer: on the pool's device.
        pool: of keys and values.
        heads: how to weigh.

    Raises:
        UnsupportedOptionError: there is no kernel for such a pool.
    """

    def __init__(self, flashinfer: FlashInfer, pool: KVPool, heads: QueryHeads) -> None:
        if lack := flashinfer_lacks(pool.geometry, heads):
            raise UnsupportedOptionError(f"--attention flashinfer has no kernels for {lack}")
        if pool.layer(0).stride(0) >= MAX_PAGE_STRIDE:
            raise UnsupportedOptionError(
                f"--attention flashinfer: pages of {pool.geometry.page_size} tokens are too large; "
                "a smaller --page-size, or --page-order layer_first"
            )
        self.flashinfer = flashinfer
        self.pool = pool
        self.heads = heads
        self.wrappers = flashinfer.wrappers(pool.geometry, heads)
        self.latest: FlashInferStepAttention | None = None

    def plan(self, batch: ForwardBatch, page_table: Int32Array) -> FlashInferStepAttention:
        """Plan the kernels of `batch`. No plan before it may be used any more."""
        self.latest = FlashInferStepAttention(self, batch, page_table)
        return self.latest


class FlashInferStepAttention:
    """The `StepAttention` of `FlashInferAttention`."""

    def __init__(
        self, backend: FlashInferAttention, batch: ForwardBatch, page_table: Int32Array
    ) -> None:
        self._backend = backend
        self._new_tokens = NewTokens(batch, page_table, backend.pool)
        self._wrapper: Wrapper | None = None
        if len(batch.positions):
            plan = plan_pages(batch, page_table, backend.pool.geometry)
            is_latent = backend.pool.geometry.latent
            self._wrapper = self._plan_latent(plan) if is_latent else self._plan_grouped(plan)

    def attend(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Write and attend; shapes as in `StepAttention.attend`."""
        backend, num_heads = self._backend, self._backend.heads.num_heads
        assert backend.latest is self, "a later plan has taken this one's place"
        if self._wrapper is None:
            return rows.new_empty(0, num_heads * backend.heads.value_dim)
        pages, queries = backend.pool.layer(layer), rows[:, :num_heads]
        self._new_tokens.write(pages, rows[:, num_heads:])
        if backend.pool.geometry.latent:
            latents = pages[:, 0, 0]  # one part, one head: [pages, page_size, head_dim]
            return self._wrapper.run(query=queries, kv_cache=latents).flatten(1)
        return self._wrapper.run(queries, (pages[:, 0], pages[:, 1])).flatten(1)

    def _plan_grouped(self, plan: PagedPlan) -> Wrapper:
        heads, geometry = self._backend.heads, self._backend.pool.geometry
        prefill, decode = self._backend.wrappers
        options: dict[str, object] = {
            "num_qo_heads": heads.num_heads,
            "num_kv_heads": geometry.num_kv_heads,
            "page_size": geometry.page_size,
            "sm_scale": heads.scale,
            # They count the tokens before a query's own.
            "window_left": -1 if geometry.window is None else geometry.window - 1,
            "logits_soft_cap": heads.softcap,
            "q_data_type": geometry.dtype,
            "kv_data_type": geometry.dtype,
        }
        to_host = self._backend.flashinfer.to_host
        pages = [to_host(one) for one in (plan.kv_indptr, plan.page_ids, plan.last_page_len)]
        if plan.is_decode:
            decode.plan(*pages, head_dim=geometry.head_dim, **options)
            return decode
        queries = to_host(plan.query_indptr)
        prefill.plan(queries, *pages, head_dim_qk=geometry.head_dim, causal=True, **options)
        return prefill

    def _plan_latent(self, plan: PagedPlan) -> Wrapper:
        heads, geometry = self._backend.heads, self._backend.pool.geometry
        flashinfer, (wrapper,) = self._backend.flashinfer, self._backend.wrappers
        arrays = (plan.query_indptr, plan.kv_indptr, plan.page_ids, plan.kv_lens)
        wrapper.plan(
            metadata=flashinfer.csr_metadata(*map(flashinfer.to_host, arrays)),
            num_heads=heads.num_heads,
            head_dim_ckv=heads.value_dim,
            head_dim_kpe=geometry.head_dim - heads.value_dim,
            page_size=geometry.page_size,
            causal=True,
            sm_scale=heads.scale,
            q_data_type=geometry.dtype,
            kv_data_type=geometry.dtype,
        )
        return wrapper
