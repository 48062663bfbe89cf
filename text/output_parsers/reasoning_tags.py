"""The tags between which models write reasoning, and how a chat template shows which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around reasoning, which stands before all else."""

    opens: tuple[str, ...]
    """The spellings of the opening tag, none of which begins with another.

    There are none if all is reasoning up to the closing tag.
    """
    closes: tuple[str, ...]
    """The spellings of the closing tag."""
    begins_inside: bool = False
    """Whether an output without the opening tag begins with reasoning all the same."""
    ends_before: str = ""
    """A tag that ends the reasoning, too, and is none of it; empty: there is none."""
    forced_end: str = ""
    """The text that ends reasoning whose budget is spent; empty: the first closing tag."""

    def ends_in(self, prompt: str) -> bool:
        """Whether a rendered prompt has begun the reasoning of the answer."""
        end = prompt.rstrip()
        return end.endswith(self.opens) or (self.begins_inside and not end.endswith(self.closes))


THINK: Final = ReasoningTags(("<think>",), ("</think>",))
_BEGUN: Final = ReasoningTags(("<think>",), ("</think>",), begins_inside=True)
_KIMI: Final = ReasoningTags(
    ("<think>",), ("</think>",), ends_before="<|tool_calls_section_begin|>"
)
_MISTRAL: Final = ReasoningTags(("[THINK]",), ("[/THINK]",))
_GRANITE: Final = ReasoningTags(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
REASONING_TAGS: Final[Mapping[str, ReasoningTags]] = {
    "think": THINK,
    "deepseek_v3": THINK,
    "deepseek_r1": _BEGUN,
    "qwen3": THINK,
    "glm45": THINK,
    "kimi_k2": _KIMI,
    "minimax_m2": _BEGUN,
    "mistral": _MISTRAL,
    "granite": _GRANITE,
}
"""All tags but harmony's, by vLLM's names."""


def reasoning_tags_of(template: str) -> ReasoningTags | None:
    """The tags that a chat template shows; None if it shows none."""
    for tags in (_MISTRAL, _GRANITE):
        if any(one in template for one in tags.opens):
            return tags
    if not any(one in template for one in (*THINK.opens, *THINK.closes)):
        return None
    return _KIMI if _KIMI.ends_before in template else THINK
