"""A format in which models write tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.text.output_parsers.call_grammar import CallGrammar
from kvrelay.text.output_parsers.marked_arguments import Schemas
from kvrelay.text.output_parsers.pieces import OutputParser


def new_call_id(_name: str, _number: int) -> str:
    """An id for a call, as OpenAI's server makes them."""
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format in which a model writes calls."""

    name: str
    """The name of the option's value, which is vLLM's."""
    parser: Callable[[Schemas, bool], OutputParser]
    """A function that makes a parser of an output, for some tools.

    True: a call is told when it is complete, and only if its arguments are JSON.
    """
    grammar: Callable[[CallGrammar], str]
    """A function that writes the grammar of an output that is calls alone.

    It raises `NoGrammarError` if the tools' schemas cannot be told in this format.
    """
    shown_by: Callable[[str], bool]
    """A function that tells whether a chat template, which shows tools, has this format."""
    openings: tuple[str, ...] = ()
    """The texts that begin calls in other text."""
    text_grammar: Callable[[CallGrammar], str] | None = None
    """A function that writes the grammar of an output in which calls may come.

    None: it follows from `openings`, if there are any.
    """
    new_id: Callable[[str, int], str] = new_call_id
    """A function that makes the id of a call without one, by its name and number."""

    def grammar_in_text(self, grammar: CallGrammar) -> str | None:
        """The grammar, in Lark's form, of an output in which calls may come.

        It is None if they cannot be told from text. It raises as `grammar` does.
        """
        if self.text_grammar is not None:
            return grammar.lark(self.text_grammar(grammar))
        return grammar.in_text(self.grammar, self.openings) if self.openings else None
