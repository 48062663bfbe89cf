"""Grammars that an output must keep to, compiled by llguidance off the threads that need them."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from tokenizers import Tokenizer

from kvrelay.text.schema_place import find_place

MAX_GRAMMAR_BYTES: Final = 64 << 10
"""Of one grammar, in whatever form. The slowest of them compile in half a second."""
_MOST_KEPT: Final = 128
_JSON_DEFAULTS: Final[Any] = {"whitespace_pattern": r"\x20|\n\x20{0,32}"}
"""A space, or a line break and its indentation: a weak model would go on with white space."""
_BYTES: Final = 256


class GrammarError(Exception):
    """A grammar cannot be used, or an output does not keep to it; the message is one line.

    Args:
        problem: what is wrong.
        place: a JSON pointer into the schema; empty: all of the grammar, or the problem names it.
    """

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(problem)
        self.place = place


class Constraint(Protocol):
    """What an output must be, in one of four forms; equal ones have equal hashes."""

    @property
    def json_schema(self) -> str | None:
        """JSON that this schema allows."""

    @property
    def regex(self) -> str | None:
        """A text that matches as a whole."""

    @property
    def choice(self) -> Sequence[str]:
        """One of these texts; empty: it is another form."""

    @property
    def grammar(self) -> str | None:
        """A text by this grammar, in Lark's form or GBNF."""


class Grammars:
    """Compiles grammars in a thread, and keeps the latest. Call it from any thread.

    Args:
        make_tokenizer: makes what grammars are compiled for; called once, at the first of them.
        fuel: how much a grammar may take to compile, as a share of what llguidance allows.
    """

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer], fuel: float = 1.0) -> None:
        self._make_tokenizer = make_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._limits = LLParserLimits(
            initial_lexer_fuel=int(1_000_000 * fuel),
            max_grammar_size=int(500_000 * fuel),
            verbose_errors=False,
        )
        self._lock = threading.Lock()
        self._kept: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "kvrelay-grammar")
        self.on_compiled: Callable[[float], object] = lambda seconds: None
        """Called in the thread with the seconds that each compilation took."""
        self.on_hit: Callable[[], object] = lambda: None
        """Called when a grammar was there already."""

    def prepare(self, constraint: Constraint) -> Future[LLMatcher]:
        """The compiled grammar, soon: at the beginning of an output. Its state is not to change.

        The future raises `GrammarError` if the grammar cannot be used. Do not cancel it: others
        may wait for the same.
        """
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
            else:
                future = self._kept[constraint] = self._thread.submit(self._compile, constraint)
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
                return future
        self.on_hit()
        return kept

    def close(self) -> None:
        """Compile no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        begun = time.monotonic()
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        matcher = self._matcher(source_of(constraint))
        self.on_compiled(time.monotonic() - begun)
        if matcher.is_error():
            self._refuse(constraint, matcher.get_error())
        return matcher

    def _matcher(self, source: str) -> LLMatcher:
        assert self._tokenizer is not None
        return LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)

    def _refuse(self, constraint: Constraint, error: str) -> None:
        """Raise the error, with its place where the grammar is a schema."""
        place = ""
        if constraint.json_schema is not None:

            def fails(schema: str) -> bool:
                return self._matcher(_of_schema(schema)).get_error() == error

            place = find_place(constraint.json_schema, fails)
        raise GrammarError(" ".join(error.split())[:500], place)


def source_of(constraint: Constraint) -> str:
    """A grammar in llguidance's own form; raises `GrammarError`."""
    if constraint.json_schema is not None:
        return _of_schema(constraint.json_schema)
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    if constraint.grammar is not None:
        try:
            return grammar_from("grammar", constraint.grammar)
        except ValueError as error:
            raise GrammarError(" ".join(str(error).split())[:500]) from error
    texts = (json.dumps(text, ensure_ascii=False) for text in constraint.choice)
    return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")


def _of_schema(schema: str) -> str:
    try:
        json.loads(schema)
        # A schema cannot ask to have keywords left out in silence.
        return LLMatcher.grammar_from_json_schema(
            schema, defaults=_JSON_DEFAULTS, overrides={"lenient": False}
        )
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"is no JSON schema: {error}") from error


def model_vocabulary(
    folder: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> Callable[[], LLTokenizer]:
    """Reads all tokens of a checkpoint: for masks of what comes next.

    It takes a third of a second for 49,152 tokens, during which no other thread runs.
    """

    def make() -> LLTokenizer:
        content = (folder / "tokenizer.json").read_text()
        return LLTokenizer(content, n_vocab=vocab_size, eos_token=list(eos_token_ids))

    return make


class _Bytes:
    """Single bytes and a tokenizer's special tokens, as llguidance wants to be told of tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = _BYTES

    def __init__(self, special: Sequence[str]) -> None:
        self.tokens = [bytes([byte]) for byte in range(_BYTES)]
        self.tokens += [token.encode() for token in special]
        self.special_token_ids = range(_BYTES, len(self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def byte_vocabulary(tokenizer: Tokenizer) -> Callable[[], LLTokenizer]:
    """Bytes instead of tokens, in no time: enough to find out whether a grammar can be used."""

    def make() -> LLTokenizer:
        added = tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        return LLTokenizer(_Bytes(special or ["<end>"]), slices=[])  # type: ignore[arg-type]

    return make
