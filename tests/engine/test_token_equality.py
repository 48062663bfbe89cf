"""Every mode gives the tokens of a plain run, with real models over real pages.

A plain run computes one request at a time, alone, in one worker, without
overlap, chunks, drafts or prefix index. In float64, or for SmolLM2 float32,
the shape of a batch changes no token, and log-probabilities by rounding only.
Requests come at random times from the seed that is in the test's name; some
are cancelled, some retracted.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvrelay.engine.config import PrefixIndexKind, Speculation
from kvrelay.model_runner.attention.kv_dtype import KVDtype
from kvrelay.wire.output import EndReason, SampledToken
from kvrelay.wire.submit import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.engine.simulation import SimRequest, Simulation
from tests.pairwise import few

SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, seed=7, top_p=0.9),
    SamplingParams(temperature=0, logprobs=2, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=3, top_k=20, frequency_penalty=0.3, logit_bias={5: 1.5}),
)
STOPS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"stop": ("e", "th")},
    {"stop_token_ids": frozenset(range(40)), "min_tokens": 3},
)


@dataclass(frozen=True)
class Mode:
    """How requests are served; the default is a plain run."""

    page_size: int = 16
    aggregated: bool = True
    overlap: bool = False
    speculation: Speculation = Speculation.NONE
    cached: bool = False
    chunk: int = 512
    retract_every: int = 0
    local: float = 0.0
    """The part of the prompts that decode workers compute."""

    def __str__(self) -> str:
        return "-".join(
            [
                "aggregated" if self.aggregated else "local" if self.local else "pair",
                f"page{self.page_size}",
                "overlap" if self.overlap else "sync",
                self.speculation,
                "radix" if self.cached else "none",
                f"chunk{self.chunk}",
            ]
            + ["retract"] * bool(self.retract_every)
        )


MODES = [
    Mode(page_size, aggregated, overlap, speculation, cached, chunk, retract)
    for page_size, aggregated, overlap, speculation, cached, chunk, retract in itertools.product(
        (1, 16),
        (False, True),
        (True, False),
        Speculation,
        (True, False),
        (16, 512),
        (0, 7),
    )
]
SPREAD = random.Random(4).sample(MODES, 12)
"""Every value of every mode is in it, in many pairs."""
LOCAL = [
    replace(mode, local=0.7)
    for mode in random.Random(5).sample([mode for mode in MODES if not mode.aggregated], 6)
]


def serve(
    model: Path,
    draft: Path,
    dtype: str,
    mode: Mode,
    seed: int = 0,
    kv_memory: int = 64 << 20,
    **options: Any,
) -> Simulation:
    return Simulation(
        seed,
        mode.page_size,
        pages=0,
        rows=0,
        chunk=mode.chunk,
        aggregated=mode.aggregated,
        local=mode.local,
        workers=1,
        tokenizer=Tokenizer.from_file(str(model / "tokenizer.json")),
        model_path=model,
        draft_model_path=draft if mode.speculation is Speculation.DRAFT else None,
        dtype=dtype,
        prefix_index=PrefixIndexKind.RADIX if mode.cached else PrefixIndexKind.NONE,
        overlap=mode.overlap,
        speculation=mode.speculation,
        num_draft_tokens=3,
        debug_retract_every=mode.retract_every,
        kv_memory=kv_memory,
        max_running=8,
        **options,
    )


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    choices: int
    max_tokens: int
    sampling: int
    stops: int
    prompt_logprobs: int | None

    def submit(self, simulation: Simulation) -> list[SimRequest]:
        return simulation.submit_choices(
            self.choices,
            list(self.prompt),
            self.max_tokens,
            sampling=SAMPLINGS[self.sampling],
            prompt_logprobs=self.prompt_logprobs,
            **STOPS[self.stops],
        )


def requests_of(seed: int, count: int, vocab_size: int, most: int) -> list[Asked]:
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(40)]
    asked = []
    for _ in range(count):
        head = shared[: rng.choice((0, 17, 40))]
        # Periodic, so that there is something for n-grams to find.
        tail = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))] * rng.randint(1, 4)
        asked.append(
            Asked(
                tuple(head + tail),
                rng.choice((1, 1, 1, 3)),
                rng.randint(1, most),
                rng.randrange(len(SAMPLINGS)),
                rng.randrange(len(STOPS)),
                rng.choice((None, None, 0, 2)),
            )
        )
    return asked


@cache
def plain_run(
    model: Path, dtype: str, asked: tuple[Asked, ...], kv_dtype: KVDtype = KVDtype.AUTO
) -> list[list[SimRequest]]:
    """Every choice of each request, at its end."""
    simulation = serve(model, model, dtype, Mode(), kv_dtype=kv_dtype)
    served = []
    for one in asked:
        served.append(one.submit(simulation))
        simulation.run()
    return served


def finish_of(request: SimRequest) -> Any:
    complete = (EndReason.STOP, EndReason.LENGTH)
    return next((end for end in request.ends.values() if end.reason in complete), None)


def assert_same(request: SimRequest, plain: SimRequest) -> None:
    assert request.output == plain.output
    assert finish_of(request) == finish_of(plain)
    assert_same_logprobs(request.samples, plain.samples)
    assert_same_logprobs(request.prompt_logprobs, plain.prompt_logprobs)


def assert_same_logprobs(ours: Sequence[SampledToken], plain: Sequence[SampledToken]) -> None:
    assert [ids_of(token) for token in ours] == [ids_of(token) for token in plain]
    assert logprobs_of(ours) == pytest.approx(logprobs_of(plain), abs=1e-4)


def ids_of(token: SampledToken) -> list[int]:
    return [token.token_id, *(token_id for token_id, _ in token.top)]


def logprobs_of(tokens: Sequence[SampledToken]) -> list[float]:
    return [
        value
        for one in tokens
        if one.logprob is not None
        for value in (one.logprob, *(other for _, other in one.top))
    ]


def assert_equal_to_plain(
    model: Path,
    draft: Path,
    dtype: str,
    mode: Mode,
    asked: list[Asked],
    seed: int,
    kv_dtype: KVDtype = KVDtype.AUTO,
) -> None:
    expected = plain_run(model, dtype, tuple(asked), kv_dtype)
    simulation = serve(model, draft, dtype, mode, seed, kv_dtype=kv_dtype)
    rng = random.Random(seed)
    served = []
    for one in asked:
        served.append(one.submit(simulation))
        for _ in range(rng.randint(0, 30)):
            simulation.step()
        if rng.random() < 0.15:
            victim = rng.choice(rng.choice(served))
            simulation.cancel(victim, rng.choice([victim.prefill, victim.decode]))
    simulation.run()
    for requests, plain in zip(served, expected, strict=True):
        for request, undisturbed in zip(requests, plain, strict=True):
            if not request.disturbed:
                assert_same(request, undisturbed)
    simulation.assert_at_baseline()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for architecture in ("llama", "gemma3", "mistral-window", "deepseek", *EXPERTS):
        make_checkpoint(folder / architecture, architecture)
    make_checkpoint(folder / "draft", "llama", seed=0)
    return folder


def cases(
    architectures: tuple[str, ...], modes: list[Mode], *marks: pytest.MarkDecorator
) -> list[Any]:
    return [
        pytest.param(
            architecture,
            mode,
            seed,
            id=f"{architecture}-{mode}-seed{seed}",
            marks=marks,
        )
        for architecture in architectures
        for mode in modes
        for seed in [(MODES + LOCAL).index(mode)]
    ]


EXPERTS = ("qwen3-moe", "glm4-moe", "minimax-m2", "gpt-oss")
REST = [mode for mode in MODES if mode not in SPREAD]
TINY = [
    *cases(("llama",), SPREAD),
    *cases(("gemma3", "mistral-window", "deepseek"), SPREAD[:3]),
    *cases(("llama",), LOCAL[1:2]),
    *cases(("gemma3",), LOCAL[2:3]),
    *cases(("llama",), LOCAL[:1] + LOCAL[2:], pytest.mark.slow),
    *cases(("gemma3",), LOCAL[:2] + LOCAL[3:], pytest.mark.slow),
    *cases(("mistral-window", "deepseek"), LOCAL, pytest.mark.slow),
    *cases(("llama",), REST, pytest.mark.slow),
    *cases(("gemma3", "mistral-window", "deepseek"), SPREAD[3:] + REST, pytest.mark.slow),
]


@few(7)
@pytest.mark.parametrize(("architecture", "mode", "seed"), TINY)
def test_tiny_models(checkpoints: Path, architecture: str, mode: Mode, seed: int) -> None:
    asked = requests_of(5, 10, 512, 12)
    model = checkpoints / architecture
    assert_equal_to_plain(model, checkpoints / "draft", "float64", mode, asked, seed)


IN_CHUNKS = [mode for mode in SPREAD if not mode.aggregated and mode.chunk == 16]


@pytest.mark.parametrize(
    ("architecture", "mode", "seed"),
    [
        *cases(("gpt-oss",), IN_CHUNKS[:1]),
        *cases(("gpt-oss",), IN_CHUNKS[1:] + LOCAL[:1], pytest.mark.slow),
        *cases(EXPERTS[:-1], [*IN_CHUNKS, *LOCAL[:1]], pytest.mark.slow),
    ],
)
def test_models_with_experts(checkpoints: Path, architecture: str, mode: Mode, seed: int) -> None:
    """And with sinks, and heads of which a part rotates."""
    asked = requests_of(5, 6, 512, 12)
    model = checkpoints / architecture
    assert_equal_to_plain(model, checkpoints / "draft", "float64", mode, asked, seed)


IN_FP8 = [
    next(mode for mode in SPREAD if not mode.aggregated and not mode.retract_every),
    next(mode for mode in SPREAD if not mode.aggregated and mode.retract_every),
]


@few(2)
@pytest.mark.parametrize(
    ("architecture", "mode", "seed"), cases(("llama", "gemma3", "deepseek"), IN_FP8)
)
def test_kv_in_fp8_is_handed_over_as_it_is(
    checkpoints: Path, architecture: str, mode: Mode, seed: int
) -> None:
    """A decode worker goes on with pages of 8 bits as the worker does that wrote them."""
    asked = requests_of(5, 6, 512, 12)
    model, draft = checkpoints / architecture, checkpoints / "draft"
    assert_equal_to_plain(model, draft, "float64", mode, asked, seed, KVDtype.FP8_E4M3)


SMOLLM2 = [pytest.param(mode, seed, id=f"{mode}-seed{seed}") for seed, mode in enumerate(SPREAD)]


@pytest.mark.slow  # `tests/cluster/test_tokens.py` has real weights
@pytest.mark.parametrize(("mode", "seed"), SMOLLM2)
def test_smollm2(smollm2: Path, mode: Mode, seed: int) -> None:
    """With itself as the draft model: it guesses right, which a random one hardly ever does."""
    gc.collect()  # of two models a worker there had better be few at a time
    asked = requests_of(6, 6, 49152, 10)
    assert_equal_to_plain(smollm2, smollm2, "float32", mode, asked, seed)
