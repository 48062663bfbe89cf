"""The stages of `benchmarks.gpu`, in order of value: what each shows, and how long it may take."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.gpu_kit.kernels import FIRST, OTHER_HEADS

_PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-m", "gpu")
_GRAPHS = ("--cuda-graphs", "decode", "--cuda-graph-sizes", "1,4,16,32,64,128")
_SERVING = ("--max-running", "128", "--chunk-tokens", "2048", "--attention", "flashinfer")


@dataclass(frozen=True)
class Stage:
    """A Python module that proves or measures something.

    Words in braces in its arguments stand for places that the runner knows.
    """

    name: str
    shows: str
    seconds: float
    """The limit on its time."""
    module: tuple[str, ...]
    arguments: tuple[str, ...]
    trial: tuple[str, ...] = ()
    """The arguments of a trial on a CPU, in place of `arguments`."""
    kernels: tuple[str, ...] = ()
    """The modules of FlashInfer that it needs, by their names in `kernels`."""
    is_test: bool = False
    """Whether pytest runs it."""

    def command(self, places: Mapping[str, object], *, trial: bool) -> list[str]:
        """Make the command; a trial is tiny, and on a CPU."""
        said = self.trial if trial else self.arguments
        return [sys.executable, "-m", *(one.format(**places) for one in (*self.module, *said))]


def _tests(
    name: str, shows: str, seconds: float, *which: str, kernels: tuple[str, ...] = ()
) -> Stage:
    return Stage(name, shows, seconds, _PYTEST, which, which, kernels, is_test=True)


def _measured(
    name: str,
    shows: str,
    seconds: float,
    arguments: tuple[str, ...] = (),
    trial: tuple[str, ...] = (),
    *,
    module: str | None = None,
    kernels: tuple[str, ...] = FIRST,
) -> Stage:
    common = ("--models", "{models}", "--figures", "{figures}", "--device", "{device}")
    ceilings = ("--terabytes-per-second", "{terabytes}", "--teraflops", "{teraflops}")
    run = (f"benchmarks.gpu_kit.stages.{module or name}", *common, *ceilings)
    return Stage(name, shows, seconds, run, arguments, trial, kernels)


def _speed(name: str, shows: str, seconds: float, model: str, *options: str) -> Stage:
    profile = ("--profile", f"{{logs}}/kernels-of-{model}.txt")
    tiny = "trial-experts" if model == "experts" else "trial"
    trial = (tiny, "--rows", "1,4", "--context", "64", "--chunks", "32", "--eager", "1", *profile)
    return _measured(name, shows, seconds, (model, *options, *profile), trial, module="speed")


GROUPS = (
    (
        _measured(
            "facts",
            "versions; every room imports; the device's ceilings, what a launch costs",
            60,
            trial=("--mebibytes", "16", "--width", "256"),
            kernels=(),
        ),
    ),
    # Side by side: none of them is timed, and most of their time is Python's.
    (
        _tests("copies", "page copies and streams", 120, "tests/mem_cache"),
        _tests(
            "sampling",
            "Triton's kernels draw the CPU's tokens",
            150,
            "tests/model_runner/test_device_sampler.py",
        ),
        _tests(
            "plain",
            "every tiny model in float32 and bfloat16, in plain torch, against transformers",
            150,
            *("tests/model_runner/test_gpu.py", "-k", "models"),
        ),
        _tests("transfer", "the transfer thread has the GPU's context", 90, "tests/kv_transfer"),
    ),
    (
        _tests(
            "attention",
            "FlashInfer against plain torch: groups of heads, latents, norms, rotation, writes",
            150,
            "tests/model_runner/test_gpu.py",
            *("-k", "attention and (group or latent or beside)"),
            kernels=FIRST,
        ),
        _tests(
            "formats",
            "products and KV in FP8, CUDA graphs, prompts over latents, grouped experts",
            180,
            *("tests/model_runner/test_gpu_formats.py", "tests/model_runner/test_gpu_experts.py"),
            *("-k", "not fused"),
            kernels=FIRST,
        ),
    ),
    (
        _measured(
            "tokens",
            "bfloat16 against transformers in float32 and bfloat16; graphs against none",
            120,
            ("llama-small", "qwen3-small", "deepseek-small"),
            ("trial", "trial-experts"),
        ),
    ),
    (
        _measured(
            "pair",
            "NIXL between two processes on one GPU: bytes, transport, GB/s",
            90,
            trial=("--pages", "32", "--counts", "1,8"),
            kernels=(),
        ),
    ),
    (
        _speed(
            "speed-1b",
            "decode and prompts of a billion weights, with graphs and without; kernels of a step",
            120,
            *("llama-1b", "--eager", "1,32"),
        ),
    ),
    (
        _measured(
            "draws",
            "what sampling costs",
            60,
            trial=("--interpret", "--rows", "1", "--vocab", "128", "--repeats", "1"),
            kernels=(),
        ),
    ),
    (
        _measured(
            "serve",
            "a prefill and a decode worker on one GPU under load; then an aggregated one",
            150,
            ("llama-1b", "--", *_GRAPHS, *_SERVING),
            (
                *("trial", "--kv-memory", "64MiB", "--shape", "32/8"),
                *("--clients", "1,2", "--seconds", "2"),
            ),
        ),
    ),
    (_speed("speed-8b", "the same of eight billion weights", 150, "llama-8b", "--eager", "1"),),
    (
        _speed(
            "experts",
            "six layers of DeepSeek-V2-Lite's size",
            90,
            *("experts", "--rows", "1,32", "--chunks", "2048", "--eager", "1,32"),
        ),
    ),
    (
        _tests(
            "attention-more",
            "heads of 64 and 256, windows, soft caps",
            240,
            *("tests/model_runner/test_gpu.py", "-k"),
            "attention and not (group or latent or beside)",
            kernels=OTHER_HEADS,
        ),
    ),
    (
        _tests(
            "experts-more",
            "FlashInfer's kernel of experts",
            1200,
            *("tests/model_runner/test_gpu_experts.py", "-k", "fused"),
        ),
    ),
    (
        _measured(
            "peers",
            "kvrelay beside vLLM and SGLang, where they are installed",
            2400,
            (
                "--vllm",
                "{vllm}",
                "--sglang",
                "{sglang}",
                "--out",
                "{out}",
                "--revision",
                "{revision}",
            ),
            ("--vllm", "{out}", "--sglang", "{out}", "--out", "{out}"),
        ),
    ),
)
"""Stages of one group run side by side, groups one after the other."""
STAGES = {stage.name: stage for group in GROUPS for stage in group}
SETS = {
    "first": (
        *("facts", "copies", "sampling", "plain", "transfer"),
        *("attention", "formats", "tokens", "pair"),
    ),
    "speed": ("facts", "speed-1b", "draws", "serve", "speed-8b", "experts"),
    "more": ("attention-more", "experts-more"),
    "all": tuple(STAGES),
}
"""Is it right, how fast is it, what compiles for long."""


def choose(names: tuple[str, ...]) -> list[list[Stage]]:
    """Choose stages by their names or those of sets; returns groups of them, in their order."""
    wanted = {stage for name in names for stage in SETS.get(name, (name,))}
    groups = [[stage for stage in group if stage.name in wanted] for group in GROUPS]
    return [group for group in groups if group]
