"""The youngest architectures of ours have transformers' tokens, whatever happens to requests.

Three sessions talk at once, in chunks, with every page that travels compared. Requests are
retracted, a decode worker dies, then a prefill worker in a chunk, and others go on for them.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvrelay.kv_transfer.verify_pages import VerifyPages
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.cluster.reference import Reference
from tests.engine.conversations import Conversation
from tests.engine.session_cluster import ends, finish, generating, sample, turns
from tests.engine.simulation import SimRequest
from tests.engine.test_token_equality import Mode, serve
from tests.pairwise import few

ARCHITECTURES = ("gpt-oss", "glm4-lite", "qwen3-moe", "glm4-moe", "minimax-m2", "youtu")
MODE = Mode(4, aggregated=False, overlap=True, cached=True, chunk=16, retract_every=7)
TOKENS = 9


@few(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, architecture)
    simulation = serve(model, model, "float64", MODE, verify_pages=VerifyPages.ALL)
    rng = random.Random(3)
    sessions = [Conversation(simulation, name) for name in "abc"]
    asked: list[SimRequest] = []
    kept = verified = 0
    for number in range(3):
        said = [
            one.say(rng.choices(range(VOCAB_SIZE), k=length), TOKENS, ignore_eos=True)
            for one, length in zip(sessions, (18, 24, 37), strict=True)
        ]
        asked += said
        decode, prefill = simulation.decodes[0], simulation.prefills[0]
        if number == 1:
            while not any(map(generating, said)):
                assert simulation.step()
            kept = turns(decode, "resumed") + ends(decode, "unusable")  # of a window that is past
            verified = sample(decode, "verified_pages")
            simulation.kill(decode)
        if number == 2:
            while not prefill.steps:
                assert simulation.step()
            simulation.kill(prefill)
        simulation.run()
    assert kept
    assert verified
    assert all(any(one.lost_worker for one in asked[start : start + 3]) for start in (3, 6))
    assert any(one.retractions and not one.lost_worker for one in asked)
    outputs = [one.output for one in asked]
    Reference(model).assert_greedy([one.prompt for one in asked], outputs, TOKENS)
    finish(simulation, *sessions)
