"""Grammars that an output must keep to, compiled by llguidance off the threads that need them."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from tokenizers import Tokenizer

from kvrelay.text.schema_place import find_place

MAX_GRAMMAR_BYTES: Final = 64 << 10
"""Of one grammar, in whatever form."""
WORKER_STACK_BYTES: Final = 256 << 20
"""Of the thread that compiles: llguidance recurses as deep as a grammar's rules do."""
_MOST_KEPT: Final = 128
_MOST_KEPT_BYTES: Final = 512 << 20
LEAST_BYTES: Final = 64 << 10
_MOST_BYTES: Final = 128 << 20
"""What one grammar is taken to occupy, at least and at most."""
_JSON_DEFAULTS: Final[Any] = {"whitespace_pattern": r"\x20|\n\x20{0,32}"}
"""A space, or a line break and its indentation: a weak model would go on with white space."""
_OPTIONS: Final = "x-guidance"
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


class GrammarCompiler:
    """Compiles one grammar at a time, for one vocabulary.

    A grammar of a stranger may take all of the stack or of the memory, and end the process: see
    `grammar_checker` for those that nobody has checked.

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

    def compile(self, constraint: Constraint) -> LLMatcher:
        """The grammar at its beginning; raises `GrammarError`, without a place."""
        matcher = self._matcher(source_of(constraint))
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        return matcher

    def place_of(self, problem: str, schema: str, may_try: Callable[[], bool]) -> str:
        """Where in a schema the problem is that `compile` has told; asks before each trial."""

        def fails(part: str) -> bool:
            return may_try() and one_line(self._matcher(_of_schema(part)).get_error()) == problem

        return find_place(schema, fails)

    def _matcher(self, source: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)


class _Compilation(Future[LLMatcher]):
    """A compiled grammar, soon.

    Args:
        constraint: what is compiled.
    """

    def __init__(self, constraint: Constraint) -> None:
        super().__init__()
        self.constraint = constraint
        self.num_bytes = LEAST_BYTES
        """What it is taken to occupy."""


class Grammars:
    """Compiles grammars in a thread with a large stack, and keeps the latest. From any thread.

    Each is compiled for those who hold its future, and is there as long as one of them does. So
    what is compiled and not kept is bounded by what requests hold, and a grammar whose requests
    have all left before its turn comes is not compiled.

    Args:
        make_tokenizer: makes what grammars are compiled for; called once, at the first of them.
    """

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._compiler = GrammarCompiler(make_tokenizer)
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[Constraint, _Compilation] = WeakValueDictionary()
        self._kept: OrderedDict[Constraint, _Compilation] = OrderedDict()
        """Those of `_held` that stay when nobody else holds them."""
        self._thread = ThreadPoolExecutor(1, "kvrelay-grammar")
        self._is_started = False
        self.on_compiled: Callable[[float], object] = lambda seconds: None
        """Called in the thread with the seconds that each compilation took."""
        self.on_hit: Callable[[], object] = lambda: None
        """Called when a grammar was there already."""

    def prepare(self, constraint: Constraint) -> Future[LLMatcher]:
        """The compiled grammar, soon: at the beginning of an output. Its state is not to change.

        The future raises `GrammarError` if the grammar cannot be used. Hold it as long as the
        grammar is needed. Do not cancel it: others may wait for the same.
        """
        with self._lock:
            held = self._held.get(constraint)
            if held is None:
                self._start()
                made = self._held[constraint] = _Compilation(constraint)
                self._thread.submit(self._compile, weakref.ref(made))
                return made
            if held.done():
                self._keep(held)
        self.on_hit()
        return held

    def close(self) -> None:
        """Compile no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Start the thread. Its stack takes address space alone until it is used."""
        if not self._is_started:
            self._is_started = True
            with stack_of(WORKER_STACK_BYTES):
                self._thread.submit(lambda: None)

    def _compile(self, wanted: weakref.ref[_Compilation]) -> None:
        made = wanted()
        if made is None:  # nobody waits for it any more
            return
        begun = time.monotonic()
        try:
            matcher, made.num_bytes = self._measured(made.constraint)
        except BaseException as error:
            self._settle(made, begun)
            made.set_exception(error)
        else:
            self._settle(made, begun)
            made.set_result(matcher)
        finally:
            del made  # or the error's traceback would hold it

    def _measured(self, constraint: Constraint) -> tuple[LLMatcher, int]:
        """The compiled grammar, and what it is taken to occupy."""
        before = _resident_bytes()
        matcher = self._compiler.compile(constraint)
        # What other threads take meanwhile counts, too: so neither end is believed.
        return matcher, min(max(_resident_bytes() - before, LEAST_BYTES), _MOST_BYTES)

    def _settle(self, made: _Compilation, begun: float) -> None:
        self.on_compiled(time.monotonic() - begun)
        with self._lock:
            self._keep(made)

    def _keep(self, compiled: _Compilation) -> None:
        """Keep what is compiled, and forget the oldest that are too many. Under the lock."""
        self._kept[compiled.constraint] = compiled
        self._kept.move_to_end(compiled.constraint)
        total = sum(one.num_bytes for one in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > _MOST_KEPT or total > _MOST_KEPT_BYTES):
            _, oldest = self._kept.popitem(last=False)
            total -= oldest.num_bytes


@contextlib.contextmanager
def stack_of(num_bytes: int) -> Iterator[None]:
    """Threads that are started meanwhile have stacks of this size."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)


def one_line(error: str) -> str:
    """An error of llguidance as a message."""
    return " ".join(error.split())[:500]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def source_of(constraint: Constraint) -> str:
    """A grammar in llguidance's own form; raises `GrammarError`."""
    if constraint.json_schema is not None:
        return _of_schema(constraint.json_schema)
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    if constraint.grammar is not None:
        _check_schemas_within(constraint.grammar)
        try:
            return grammar_from("grammar", constraint.grammar)
        except ValueError as error:
            raise GrammarError(one_line(str(error))) from error
    texts = (json.dumps(text, ensure_ascii=False) for text in constraint.choice)
    return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")


def _check_schemas_within(grammar: str) -> None:
    """Raises `GrammarError` if a schema in a grammar sets options, as `_of_schema` forbids them.

    What Python cannot read may still be JSON to llguidance: with the option's name anywhere in the
    grammar, it is refused. So each part of the grammar is read once or twice.
    """
    if "guidance" not in grammar and "\\u" not in grammar:
        return  # no schema can name the option
    decoder = json.JSONDecoder()
    for found in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = decoder.raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            schema = {_OPTIONS: None}
        if isinstance(schema, dict) and _OPTIONS in schema:
            raise GrammarError(f"{_OPTIONS} is not allowed")


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


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Those that a grammar may name."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special]


def byte_vocabulary(special: Sequence[str]) -> Callable[[], LLTokenizer]:
    """Bytes instead of tokens, in no time: enough to find out whether a grammar can be used."""

    def make() -> LLTokenizer:
        return LLTokenizer(_Bytes(special or ["<end>"]), slices=[])  # type: ignore[arg-type]

    return make
