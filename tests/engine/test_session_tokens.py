"""Turns of sessions have the tokens of plain runs, with real models over real pages.

Each turn's reference is the whole conversation as one prompt, computed alone, without a prefix
index, overlap, chunks or drafts. Models with full attention, windows and latent KV.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.engine.config import Speculation
from kvrelay.wire.submit import KeptSession
from tests.checkpoints import make_checkpoint
from tests.engine.session_cluster import ends, sample, turns
from tests.engine.test_token_equality import SAMPLINGS, Asked, Mode, assert_same, plain_run, serve
from tests.pairwise import few, share

ARCHITECTURES = ("llama", "gemma3", "mistral-window", "deepseek")
OVERLAPPED = Mode(overlap=True, cached=True, chunk=16)
MODES = [
    OVERLAPPED,
    replace(OVERLAPPED, aggregated=False),
    replace(OVERLAPPED, aggregated=False, local=1.0, speculation=Speculation.NGRAM),
    replace(OVERLAPPED, page_size=1, speculation=Speculation.DRAFT, retract_every=7),
    replace(OVERLAPPED, aggregated=False, local=0.5, speculation=Speculation.DRAFT, cached=False),
    replace(OVERLAPPED, overlap=False, aggregated=False, retract_every=5),
]
KEPT = KeptSession("s", 1 << 20)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for architecture in ARCHITECTURES:
        make_checkpoint(folder / architecture, architecture)
    make_checkpoint(folder / "draft", "llama", seed=0)
    return folder


@few(3)
@pytest.mark.parametrize(("architecture", "mode"), share(ARCHITECTURES, MODES), ids=str)
def test_turns_have_the_tokens_of_a_plain_run(
    checkpoints: Path, architecture: str, mode: Mode
) -> None:
    rng, model = random.Random(3), checkpoints / architecture
    simulation = serve(model, checkpoints / "draft", "float64", mode)
    history: list[int] = []
    for number in range(4):
        new = [rng.randrange(512) for _ in range(rng.choice((3, 20, 40)))]
        kept = history[: rng.randint(1, len(history))] if number == 3 else history
        prompt, sampling = [*kept, *new], rng.randrange(len(SAMPLINGS))
        turn = simulation.submit(prompt, 9, sampling=SAMPLINGS[sampling], session=KEPT)
        simulation.run()
        asked = Asked(tuple(prompt), 1, 9, sampling, 0, None)
        [[plain]] = plain_run(model, "float64", (asked,))
        assert_same(turn, plain)
        history = [*prompt, *turn.output]
    worker = simulation.decodes[0]
    assert turns(worker, "resumed") + ends(worker, "unusable") + ends(worker, "roll_back") >= 2
    if mode.aggregated or architecture in ("llama", "deepseek"):
        assert turns(worker, "resumed") >= 1
    simulation.detach(worker)
    simulation.run()
    simulation.assert_at_baseline()


@few(2)
@pytest.mark.parametrize(("architecture", "mode"), share(("llama", "deepseek"), [
    replace(OVERLAPPED, aggregated=False),
    replace(OVERLAPPED, aggregated=False, overlap=False, page_size=1, retract_every=7),
    replace(OVERLAPPED, aggregated=False, speculation=Speculation.DRAFT),
]), ids=str)  # fmt: skip
def test_turns_without_a_session_read_the_last_answer_and_have_the_tokens_of_a_plain_run(
    checkpoints: Path, architecture: str, mode: Mode
) -> None:
    rng, model = random.Random(3), checkpoints / architecture
    simulation = serve(model, checkpoints / "draft", "float64", mode)
    history: list[int] = []
    for number in range(5):
        prompt = [*history, *(rng.randrange(512) for _ in range(20))]
        sampling = number % len(SAMPLINGS)
        turn = simulation.submit(prompt, 18, sampling=SAMPLINGS[sampling])
        simulation.run()
        asked = Asked(tuple(prompt), 1, 18, sampling, 0, None)
        [[plain]] = plain_run(model, "float64", (asked,))
        assert_same(turn, plain)
        history = [*prompt, *turn.output]
    assert sample(simulation.prefills[0], "history_reads", outcome="valid") >= 1
    simulation.assert_at_baseline()
