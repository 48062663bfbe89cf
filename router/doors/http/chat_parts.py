"""The parts of a chat's output in answers: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from json.encoder import encode_basestring_ascii as quoted

from kvrelay.text.output_parsers.json_calls import is_json
from kvrelay.text.output_parsers.pieces import OutputParser, OutputPiece


class ToldReasoning(Enum):
    """The way in which an answer tells reasoning."""

    AS_IT_COMES = auto()
    AT_ITS_END = auto()
    """In one piece, also in a stream."""
    AS_CONTENT = auto()
    NEVER = auto()


class Spoken:
    """One choice's output, split into its parts.

    Args:
        parser: the parser that splits it.
        new_id: makes the id of a call, by its name and number, if the model has written none.
        told: the way in which reasoning is told.
    """

    def __init__(
        self, parser: OutputParser, new_id: Callable[[str, int], str], told: ToldReasoning
    ) -> None:
        self._parser = parser
        self._new_id = new_id
        self.told = told
        """The way in which reasoning is told."""
        self.reasoning_tokens = 0
        """The tokens of the reasoning, as far as its text is known."""
        self.is_unclosed = False
        """Whether the output has ended in its reasoning."""
        self._uncounted = 0
        """The latest tokens, whose text is a part of no piece yet."""
        self._late: list[str] = []
        """The reasoning that is told at its end."""
        self._pieces: list[OutputPiece] = []
        """The pieces of a whole answer."""
        self._begun: list[tuple[str, str]] = []
        self._arguments: list[list[str]] = []
        """Of each call, its id and its name, and the parts of its arguments."""

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, all of which have arguments that clients can read."""
        return bool(self._begun) and all(is_json("".join(parts)) for parts in self._arguments)

    def push(self, text: str, num_tokens: int) -> list[str]:
        """Return the members of chunks that some more text completes; often none."""
        return self._deltas(self._parse(text, num_tokens))

    def finish(self, *, is_cut: bool) -> list[str]:
        """Return the members of the last chunks, for an output that was cut off or not."""
        deltas = self._deltas(self._counted(self._parser.finish(is_cut=is_cut)))
        return [*deltas, *self._late_reasoning()]

    def pieces(self, text: str, num_tokens: int) -> list[OutputPiece]:
        """Return the pieces that some more text completes; a call's first one has its id."""
        return self._noted(self._parse(text, num_tokens))

    def last_pieces(self, *, is_cut: bool) -> list[OutputPiece]:
        """Return the last pieces, for an output that was cut off or not."""
        return self._noted(self._counted(self._parser.finish(is_cut=is_cut)))

    def _noted(self, pieces: Sequence[OutputPiece]) -> list[OutputPiece]:
        noted = []
        for piece in pieces:
            self._note(piece)
            is_first = piece.call is not None and piece.name
            noted.append(replace(piece, call_id=self._begun[-1][0]) if is_first else piece)
        return noted

    def take(self, text: str, num_tokens: int) -> None:
        """Take some more text of a whole answer."""
        self._pieces += self._parse(text, num_tokens)

    def message(self, *, is_cut: bool) -> str:
        """Return the member of a whole answer's choice, for all of the text that it was given."""
        self._pieces += self._counted(self._parser.finish(is_cut=is_cut))
        for piece in self._pieces:
            self._note(piece)
        in_content = self.told is ToldReasoning.AS_CONTENT
        content = "".join(
            [piece.content or (piece.reasoning if in_content else "") for piece in self._pieces]
        )
        is_told = self.told not in (ToldReasoning.AS_CONTENT, ToldReasoning.NEVER)
        reasoning = "".join([piece.reasoning for piece in self._pieces]) if is_told else ""
        whole = zip(self._begun, map("".join, self._arguments), strict=True)
        calls = [_begun(*begun, arguments) for begun, arguments in whole]
        members = ['"role":"assistant"']
        members.append(f'"content":{quoted(content) if content or not calls else "null"}')
        if reasoning:
            members.append(_reasoning(reasoning))
        if calls:
            members.append(f'"tool_calls":[{",".join(calls)}]')
        return f'"message":{{{",".join(members)}}}'

    def _parse(self, text: str, num_tokens: int) -> Sequence[OutputPiece]:
        self._uncounted += num_tokens
        return self._counted(self._parser.push(text))

    def _counted(self, pieces: Sequence[OutputPiece]) -> Sequence[OutputPiece]:
        """Count the tokens of reasoning among those of which no piece has told before.

        A piece that only says that the reasoning is not closed is left out.
        """
        self.is_unclosed = self.is_unclosed or any(one.is_unclosed for one in pieces)
        pieces = [one for one in pieces if one.reasoning or not one.is_unclosed]
        total = sum([len(one.reasoning + one.content + one.arguments) for one in pieces])
        if pieces:
            reasoning = sum([len(one.reasoning) for one in pieces])
            self.reasoning_tokens += round(self._uncounted * reasoning / max(total, 1))
            self._uncounted = 0
        return pieces

    def _deltas(self, pieces: Sequence[OutputPiece]) -> list[str]:
        deltas: list[str] = []
        for piece in pieces:
            if not piece.reasoning:
                deltas += [*self._late_reasoning(), self._delta(piece)]
            elif self.told is ToldReasoning.AT_ITS_END:
                self._late.append(piece.reasoning)
            elif self.told is not ToldReasoning.NEVER:
                deltas.append(self._delta(piece))
        return deltas

    def _late_reasoning(self) -> list[str]:
        """Return the member with the reasoning that was held back, if there is any."""
        reasoning, self._late = "".join(self._late), []
        return [f'"delta":{{{_reasoning(reasoning)}}}'] if reasoning else []

    def _delta(self, piece: OutputPiece) -> str:
        if piece.call is None:
            if piece.reasoning and self.told is not ToldReasoning.AS_CONTENT:
                return f'"delta":{{{_reasoning(piece.reasoning)}}}'
            return f'"delta":{{"content":{quoted(piece.reasoning or piece.content)}}}'
        self._note(piece)
        if piece.name:
            call = _begun(*self._begun[-1], "", f'"index":{piece.call},')
        else:
            arguments = quoted(piece.arguments)
            call = f'{{"index":{piece.call},"function":{{"arguments":{arguments}}}}}'
        return f'"delta":{{"tool_calls":[{call}]}}'

    def _note(self, piece: OutputPiece) -> None:
        """Keep a call's id, name and arguments."""
        if piece.call is not None and piece.name:
            call_id = piece.call_id or self._new_id(piece.name, piece.call)
            self._begun.append((call_id, piece.name))
            self._arguments.append([])
        if piece.call is not None:
            self._arguments[-1].append(piece.arguments)


def _reasoning(text: str) -> str:
    """Return the members with reasoning, under the name that clients use, and the older one."""
    value = quoted(text)
    return f'"reasoning":{value},"reasoning_content":{value}'


def _begun(call_id: str, name: str, arguments: str, index: str = "") -> str:
    function = f'{{"name":{quoted(name)},"arguments":{quoted(arguments)}}}'
    return f'{{{index}"id":{quoted(call_id)},"type":"function","function":{function}}}'
