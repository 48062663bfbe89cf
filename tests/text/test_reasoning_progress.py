"""Where reasoning ends, by the bytes of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvrelay.text.reasoning_progress import ReasoningPhase, ReasoningProgress
from kvrelay.wire.submit import Reasoning

THINK = Reasoning(begins=("<think>",), ends=("</think>",))
BEGUN = Reasoning(begun=True, ends=("</think>",))
GRANITE = Reasoning(
    begins=("Here is my thought process:", "Here's my thought process:"),
    ends=("Here is my response:", "Here's my response:"),
)
KIMI = Reasoning(begun=True, ends=("</think>",), ends_before=("<|calls|>",))


def follow(reasoning: Reasoning, tokens: Sequence[str]) -> tuple[ReasoningProgress, list[bool]]:
    """The progress behind tokens with these texts, and which of them follow the reasoning."""
    progress = ReasoningProgress(reasoning, lambda index: tokens[index].encode())
    return progress, [progress.push(index) for index in range(len(tokens))]


@pytest.mark.parametrize(
    ("reasoning", "tokens", "follows_at", "num_thought"),
    [
        (THINK, ["<think>", "Hm", "</think>", "Yes"], 3, 2),
        (THINK, ["\n", "<th", "ink>Hm", " </", "think", ">", "\n\n", "Yes"], 7, 3),
        (THINK, ["Yes"], 0, 0),
        (THINK, ["<th", "e>"], 0, 0),
        (THINK, ["<think></think>", "Yes"], 1, 0),
        (BEGUN, ["a<", "</thin", "</think>\n", "\n", "\n"], 4, 3),
        (BEGUN, ["</think>", " Yes"], 1, 1),
        (BEGUN, ["</think>", "\n\n", "\n"], 2, 1),
        (GRANITE, ["Here", "'s my thought process: ", "Hm. Here is my ", "response:", "x"], 4, 2),
        (KIMI, ["Hm", "<|calls|>", "x"], 1, 2),
        (Reasoning(ends=("x",)), ["y"], 0, 0),
    ],
)
def test_where_what_follows_begins(
    reasoning: Reasoning, tokens: list[str], follows_at: int, num_thought: int
) -> None:
    progress, follows = follow(reasoning, tokens)
    assert (progress.follows_at, progress.num_thought) == (follows_at, num_thought)
    assert progress.phase is ReasoningPhase.BEHIND
    assert not any(follows[:follows_at])
    assert follows[-1] is (follows_at < len(tokens))


@pytest.mark.parametrize("reasoning", [THINK, BEGUN, KIMI])
@pytest.mark.parametrize("end", ["</think>", "</thi", "<|calls|>", "\n"])
def test_a_known_output_is_followed_as_if_token_by_token(reasoning: Reasoning, end: str) -> None:
    tokens = ["<think>", *["Hm "] * 600, end, "nk>", "\n", *["Yes"] * 600]
    one_by_one, _ = follow(reasoning, tokens)
    for first in (0, 1, 255, 601, 603):
        at_once = ReasoningProgress(reasoning, lambda index: tokens[index].encode())
        at_once.follow(range(first))
        at_once.follow(range(first, len(tokens)))
        for name in ("num_tokens", "num_thought", "follows_at", "phase", "_tail"):
            assert getattr(at_once, name) == getattr(one_by_one, name)


@pytest.mark.parametrize(
    ("reasoning", "tokens", "phase"),
    [
        (THINK, [" <thin"], ReasoningPhase.UNDECIDED),
        (THINK, ["<think>", "</think"], ReasoningPhase.INSIDE),
        (BEGUN, ["</think>", "\n"], ReasoningPhase.GAP),
    ],
)
def test_an_output_that_has_not_come_so_far(
    reasoning: Reasoning, tokens: list[str], phase: ReasoningPhase
) -> None:
    progress, follows = follow(reasoning, tokens)
    assert (progress.phase, progress.follows_at) == (phase, None)
    assert not any(follows)
    ahead = progress.copy()
    ahead.num_tokens = 99
    assert progress.num_tokens == len(tokens)


def test_ends_that_have_begun() -> None:
    progress, _ = follow(Reasoning(begun=True, ends=("aab", "abc")), ["xaa"])
    assert progress.unfinished_ends(2) == {b"b", b"ab", b"bc"}
    assert progress.unfinished_ends(1) == {b"b"}
