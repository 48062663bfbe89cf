"""Reasoning between two tags, before all else."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.text.output_parsers.held_text import EndingSpace, is_long, overlap
from kvrelay.text.output_parsers.pieces import OutputParser, OutputPiece
from kvrelay.text.output_parsers.reasoning_tags import THINK, ReasoningTags


class ReasoningParser:
    """A parser of reasoning between two tags; another parser takes the text behind it.

    Args:
        rest: the parser of the text behind the reasoning.
        begins_inside: the prompt has begun the reasoning.
        skips_space: white space at the beginning does not belong to the text.
        form: the tags.
    """

    def __init__(
        self,
        rest: OutputParser,
        *,
        begins_inside: bool,
        skips_space: bool = True,
        form: ReasoningTags = THINK,
    ) -> None:
        self._rest = rest
        self._form = form
        self._begins_inside = begins_inside
        self._held = ""
        self._is_inside: bool | None = None
        """Whether the text is inside the reasoning; None: it is not known yet."""
        self._skips_space = skips_space
        """White space right behind a tag does not belong to the text."""
        self._space = EndingSpace()

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""
        self._held += text
        if self._is_inside is None:
            begun = self._held.lstrip()
            waits = not is_long(len(self._held) - len(begun))
            opened = next((one for one in self._form.opens if begun.startswith(one)), None)
            if opened is not None and waits:
                self._is_inside, self._held = True, begun.removeprefix(opened)
                self._skips_space = True
            elif any(one.startswith(begun) for one in self._form.opens) and waits:
                return []
            else:
                self._decide()
        if self._is_inside:
            return self._inside()
        return self._behind()

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The remaining pieces."""
        if self._is_inside is None:
            self._decide()
        if self._is_inside:
            pieces = [*self._inside()]
            held, self._held = self._space.cut(self._held), ""
            return [*pieces, OutputPiece(reasoning=held, is_unclosed=True)]
        return [*self._behind(), *self._rest.finish(is_cut=is_cut)]

    def _decide(self) -> None:
        """Take the text for reasoning if the prompt has begun it, as no opening tag comes."""
        self._is_inside = self._begins_inside
        self._skips_space = self._skips_space and self._begins_inside

    def _inside(self) -> Sequence[OutputPiece]:
        if self._skips_space:
            self._held = self._held.lstrip()
            self._skips_space = not self._held
        tags = [*self._form.closes, *filter(None, [self._form.ends_before])]
        found = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
        if not found:
            possible = max(overlap(self._held, tag) for tag in tags)
            sure = self._space.cut(self._held[: len(self._held) - possible])
            self._held = self._held[len(sure) :]
            return [OutputPiece(reasoning=sure)] if sure else []
        at, tag = min(found)
        said = self._space.cut(self._held[:at])
        self._held = self._held[at + (len(tag) if tag in self._form.closes else 0) :]
        self._is_inside, self._skips_space = False, True
        return [*([OutputPiece(reasoning=said)] if said else []), *self._behind()]

    def _behind(self) -> Sequence[OutputPiece]:
        text, self._held = self._held, ""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return self._rest.push(text)
