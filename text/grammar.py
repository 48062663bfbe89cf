"""Grammars that an output must keep to, compiled by llguidance off the threads that need them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import queue
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

from kvrelay.text.json_schema import enforced, find_place
from kvrelay.text.regex_classes import ascii_classes
from kvrelay.text.tokenizer import tokenizer_json

MAX_GRAMMAR_BYTES: Final = 64 << 10
"""The longest grammar, in whatever form."""
WORKER_STACK_BYTES: Final = 256 << 20
"""The stack of the thread that compiles: llguidance recurses as deep as a grammar's rules do."""
_LEXER_FUEL: Final = 400_000
"""The work of a grammar's compilation and first mask; a unit takes a microsecond and 200 bytes."""
_MASK_FUEL: Final = 50_000
"""The same for each later mask."""
_LEXER_STATES: Final = 32 << 10
"""The most states that a grammar's lexer learns from all outputs: about a kilobyte each."""
_ALTERNATIVES: Final = 4000
"""The most alternatives that a grammar may have at any place."""
_RULE_SYMBOLS: Final = 500_000
"""The most symbols in a grammar's rules."""
_BYTES_A_SECOND: Final = 100_000_000
"""The most memory that a second of masks takes: that of a lexer that learns all the time."""
_LARGE_BYTES: Final = 2 << 20
"""A grammar of more bytes gives its memory back to the system when it is gone."""
_TRIM_SECONDS: Final = 0.5
_MOST_KEPT: Final = 128
_MOST_KEPT_BYTES: Final = 128 << 20
LEAST_BYTES: Final = 64 << 10
MOST_BYTES: Final = 48 << 20
"""The bounds of the estimate of what one grammar occupies (`LEAST_BYTES`, `MOST_BYTES`)."""
_JSON_DEFAULTS: Final[Any] = {"whitespace_pattern": r"\x20|\n\x20{0,32}"}
"""White space in JSON: one space, or a line break and its indentation.

With more allowed, a weak model would go on with white space.
"""
_IS_LARK: Final = re.compile(r"^\s*(%llguidance\b|[?!]*start\s*(\.\d+)?\s*:(?!:=))", re.MULTILINE)
_LARK_PART: Final = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|\#[^\n]*|/(?:[^/\\\n]|\\.)+/|%json\s*', re.DOTALL
)
"""A text, a comment, a regular expression, or what comes before a schema."""


_NO_SCHEMA: Final = (ValueError, TypeError, ArithmeticError, RecursionError)
"""The errors of reading what is no schema."""


class GrammarError(Exception):
    """A grammar cannot be used, or an output does not keep to it; the message is one line.

    Args:
        problem: the message.
        place: a JSON pointer into the schema; empty: the whole grammar, or the problem names the
            place.
    """

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(problem)
        self.place = place


class Constraint(Protocol):
    """The form that an output must have, one of four; equal constraints have equal hashes."""

    @property
    def json_schema(self) -> str | None:
        """The JSON schema that the output must keep to, itself in JSON."""

    @property
    def regex(self) -> str | None:
        """The regular expression that must match the whole output."""

    @property
    def choice(self) -> Sequence[str]:
        """The texts that the output may be; empty if another form is set."""

    @property
    def grammar(self) -> str | None:
        """The grammar of the output, in Lark's form or GBNF."""


class GrammarCompiler:
    """A compiler of grammars for one vocabulary, one grammar at a time.

    A grammar may use up the stack or the memory, and so end the process. Let `grammar_checker`
    check an unknown grammar first.

    Args:
        make_tokenizer: makes the vocabulary that grammars are compiled for; called once, for the
            first grammar.
        share: the work that a grammar may take, as a share of a worker's bounds.
    """

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer], share: float = 1.0) -> None:
        self._make_tokenizer = make_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._limits = LLParserLimits(
            initial_lexer_fuel=int(_LEXER_FUEL * share),
            step_lexer_fuel=int(_MASK_FUEL * share),
            max_lexer_states=_LEXER_STATES,
            max_items_in_row=_ALTERNATIVES,
            max_grammar_size=int(_RULE_SYMBOLS * share),
            verbose_errors=False,
        )

    @property
    def tokenizer(self) -> LLTokenizer:
        """The vocabulary."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            return self._tokenizer

    def compile(self, constraint: Constraint) -> LLMatcher:
        """The compiled grammar, in its initial state, whose first mask is known.

        Raises:
            GrammarError: it cannot be compiled, or has no first mask; the error has no place.
        """
        return self._compile(source_of(constraint))

    def place_of(self, problem: str, schema: str, may_try: Callable[[], bool]) -> str:
        """The place of `compile`'s problem in a schema; asks `may_try` before each trial."""

        def fails(part: str) -> bool:
            try:
                if may_try():
                    self._compile(_of_schema(part))
            except GrammarError as error:
                return str(error) == problem
            return False

        return find_place(schema, fails)

    def _compile(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=self._limits)
        raise_problem(matcher)
        # Text that a grammar forces is followed to its end before the first mask.
        first = matcher.deep_copy()
        first.compute_bitmask()
        raise_problem(first)
        return matcher


class CompiledGrammar:
    """A compiled grammar. All matchers of it share a lexer, which learns from each mask.

    Args:
        matcher: the grammar in its initial state.
        num_bytes: the estimate of its memory.
        on_spent: called once it is spent.
        on_freed: called when a large one is gone.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        num_bytes: int,
        on_spent: Callable[[CompiledGrammar], object],
        on_freed: Callable[[None], object],
    ) -> None:
        self._matcher: LLMatcher | None = matcher
        self._on_spent = on_spent
        self._on_freed = on_freed
        self._is_large = False
        self.num_bytes = num_bytes
        """The estimate of the memory that it takes now."""
        self.num_matchers = 0
        """The matchers that were made of it."""
        self.charge(0.0)

    @property
    def is_spent(self) -> bool:
        """Whether it has learnt so much, or failed, that another takes its place."""
        return self._matcher is None

    def new_matcher(self) -> LLMatcher | None:
        """A matcher in its initial state; None: the grammar is spent."""
        matcher = self._matcher
        if matcher is None:
            return None
        self.num_matchers += 1
        return matcher.deep_copy()

    def charge(self, seconds: float) -> None:
        """Count what masks have taken that took so long, the memory not being told."""
        self.num_bytes += int(seconds * _BYTES_A_SECOND)
        if not self._is_large and self.num_bytes > _LARGE_BYTES:
            self._is_large = True
            weakref.finalize(self, self._on_freed, None).atexit = False
        if self.num_bytes > MOST_BYTES:
            self.spend()

    def spend(self) -> None:
        """Let no more matchers be made; its memory is free once those that are there are gone."""
        if self._matcher is not None:
            self._matcher = None
            self._on_spent(self)


class _Compilation(Future[CompiledGrammar]):
    """The future of a compiled grammar.

    Args:
        constraint: the constraint to compile.
    """

    def __init__(self, constraint: Constraint) -> None:
        super().__init__()
        self.constraint = constraint
        self.begun = False
        self.compiled: CompiledGrammar | None = None
        """The compiled grammar; None: it is not there yet, or cannot be used."""

    @property
    def num_bytes(self) -> int:
        """The estimated memory of the compiled grammar."""
        return self.compiled.num_bytes if self.compiled is not None else LEAST_BYTES


class Grammars:
    """A cache of grammars, compiled in a thread with a large stack. Any thread may call it.

    The latest are kept; any other lives as long as a request holds its future. So the number of
    grammars is bounded. A grammar that no request holds any more when its turn comes is not
    compiled. One that is spent is compiled anew.

    Args:
        make_tokenizer: makes the vocabulary that grammars are compiled for; called once, for the
            first grammar.
    """

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._compiler = GrammarCompiler(make_tokenizer)
        self._lock = threading.Lock()
        self._held: WeakValueDictionary[Constraint, _Compilation] = WeakValueDictionary()
        self._kept: OrderedDict[Constraint, _Compilation] = OrderedDict()
        """The members of `_held` that stay when nobody else holds them."""
        self._thread = ThreadPoolExecutor(1, "kvrelay-grammar")
        self._renewing = ThreadPoolExecutor(1, "kvrelay-grammar-renewal")
        """A thread for grammars that outputs in progress wait for, beside those of new requests."""
        self._freed: queue.SimpleQueue[None] = queue.SimpleQueue()
        """An entry for each large grammar that is gone: a finalizer may put into this queue."""
        self._is_started = False
        self.on_compiled: Callable[[float], object] = lambda seconds: None
        """A callback in the thread, with the seconds of each compilation."""
        self.on_hit: Callable[[], object] = lambda: None
        """A callback for each grammar that was there already."""

    @property
    def tokenizer(self) -> LLTokenizer:
        """The vocabulary, which the first grammar or the first call makes."""
        return self._compiler.tokenizer

    def prepare(
        self, constraint: Constraint, *, is_awaited: bool = False
    ) -> Future[CompiledGrammar]:
        """The future of the compiled grammar; `is_awaited`: a step waits, so it is not queued.

        The future raises `GrammarError` if the grammar cannot be used. Hold it as long as the
        grammar is needed. Do not cancel it: others may wait for the same future.
        """
        with self._lock:
            held = self._held.get(constraint)
            if held is None or (held.compiled is not None and held.compiled.is_spent):
                self._start()
                made = self._held[constraint] = _Compilation(constraint)
                thread = self._renewing if is_awaited else self._thread
                thread.submit(self._compile, weakref.ref(made))
                return made
            if held.done():
                self._keep(held)
            elif is_awaited:
                self._renewing.submit(self._compile, weakref.ref(held))
        self.on_hit()
        return held

    def compile_apart(self, constraint: Constraint) -> CompiledGrammar:
        """Compile a grammar that nobody else gets, and wait for it.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        with self._lock:
            self._start()
        return self._renewing.submit(self._timed, constraint).result()

    def _timed(self, constraint: Constraint) -> CompiledGrammar:
        begun = time.monotonic()
        try:
            return self._measured(constraint)
        finally:
            self.on_compiled(time.monotonic() - begun)

    def close(self) -> None:
        """Compile no more."""
        for thread in (self._thread, self._renewing):
            thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Start the threads. The stack takes only address space until it is used."""
        if not self._is_started:
            self._is_started = True
            threading.Thread(
                target=_trim_when_freed, args=(self._freed,), name="grammar-trim", daemon=True
            ).start()
            with stack_of(WORKER_STACK_BYTES):
                self._thread.submit(lambda: None)
                self._renewing.submit(lambda: None)

    def _compile(self, wanted: weakref.ref[_Compilation]) -> None:
        made = wanted()
        if made is None:  # nobody waits for it any more
            return
        with self._lock:
            if made.begun:
                return
            made.begun = True
        begun = time.monotonic()
        try:
            made.compiled = self._measured(made.constraint)
        except BaseException as error:
            self._settle(made, begun)
            made.set_exception(error)
        else:
            self._settle(made, begun)
            made.set_result(made.compiled)
        finally:
            del made  # or the error's traceback would hold it

    def _measured(self, constraint: Constraint) -> CompiledGrammar:
        """The compiled grammar, with the estimate of its memory in bytes."""
        before = _resident_bytes()
        matcher = self._compiler.compile(constraint)
        # Memory that other threads take meanwhile counts, too: so the estimate has bounds.
        num_bytes = min(max(_resident_bytes() - before, LEAST_BYTES), MOST_BYTES // 2)
        return CompiledGrammar(matcher, num_bytes, self._drop_spent, self._freed.put)

    def _settle(self, made: _Compilation, begun: float) -> None:
        self.on_compiled(time.monotonic() - begun)
        with self._lock:
            self._keep(made)

    def _keep(self, compiled: _Compilation) -> None:
        """Keep a compiled grammar, and drop the oldest beyond the bounds. Under the lock."""
        self._kept[compiled.constraint] = compiled
        self._kept.move_to_end(compiled.constraint)
        sizes = [one.num_bytes for one in self._kept.values()]
        total = sum(sizes)
        for size in sizes[:-1]:
            if len(self._kept) <= _MOST_KEPT and total <= _MOST_KEPT_BYTES:
                break
            self._kept.popitem(last=False)
            total -= size

    def _drop_spent(self, spent: CompiledGrammar) -> None:
        with self._lock:
            for constraint, kept in self._kept.items():
                if kept.compiled is spent:
                    del self._kept[constraint]
                    return


def _trim_when_freed(freed: queue.SimpleQueue[None]) -> None:
    """Give the system back what large grammars had; threads' heaps keep it otherwise."""
    while True:
        freed.get()
        time.sleep(_TRIM_SECONDS)  # others follow, and the finalizer comes before the memory
        with contextlib.suppress(queue.Empty):
            while True:
                freed.get_nowait()
        trim_heap()


def trim_heap() -> None:
    """Let the C library give free memory back to the system, if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def raise_problem(matcher: LLMatcher) -> None:
    """Raise `GrammarError` if a matcher cannot go on."""
    if matcher.is_error():
        raise GrammarError(words_of(matcher.get_error()))


@contextlib.contextmanager
def stack_of(num_bytes: int) -> Iterator[None]:
    """Give threads that are started meanwhile stacks of this size."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)


_PLACE_IN_LARK: Final = re.compile(r"\d+\(\d+\): ")
"""The line and the column of an error in a grammar's text, which its message begins with."""
_WORDS: Final = (
    ("initial lexer configuration", "takes too much work to compile: its terminals are too large"),
    ("fuel exhausted", "takes too much work to compile: its terminals are too large"),
    ("lexer precomputation", "takes too much work to compile: its terminals are too large"),
    ("lexer error", "allows so much at once that it takes too much work, or memory, to follow"),
    ("Too many items", "allows so much at once that it takes too much work to follow"),
    ("Current row has", "allows too many alternatives at once"),
    ("NoExtension", "allows no output: nothing can match it"),
    ("coerce_one_of", "oneOf is supported for schemas that exclude each other alone: use anyOf"),
)
"""Parts of llguidance's messages, in which nobody finds what to do, and what is said instead."""


def words_of(error: str) -> str:
    """The message for an error of llguidance, on one line."""
    is_placed = _PLACE_IN_LARK.match(error) is not None
    for part, words in () if is_placed else _WORDS:
        if part in error:
            return words
    return one_line(error.replace("<non-verbose/>", ""))


def one_line(error: str) -> str:
    """A message on one line, cut where it is too long."""
    return " ".join(error.split())[:500]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def source_of(constraint: Constraint) -> str:
    """A grammar in llguidance's own form; raises `GrammarError`."""
    if constraint.json_schema is not None:
        return _of_schema(constraint.json_schema)
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(ascii_classes(constraint.regex))
    if constraint.grammar is not None:
        if _IS_LARK.search(constraint.grammar):
            return LLMatcher.grammar_from_lark(_lark(constraint.grammar))
        try:
            return grammar_from("grammar", constraint.grammar)
        except ValueError as error:
            raise GrammarError(one_line(str(error))) from error
    texts = [json.dumps(text, ensure_ascii=False) for text in constraint.choice if text]
    # One terminal, whatever the number of texts; it cannot be empty, which a rule can.
    start = " | ".join(
        [*(["CHOICE"] if texts else []), *(['""'] if "" in constraint.choice else [])]
    )
    terminal = f"\nCHOICE: {' | '.join(texts)}" if texts else ""
    return LLMatcher.grammar_from_lark(f"start: {start}{terminal}")


def _lark(grammar: str) -> str:
    """A grammar in Lark's form as it is compiled: schemas and regular expressions as elsewhere.

    Raises:
        GrammarError: a schema in it is no JSON.
    """
    decoder, parts, end = json.JSONDecoder(), [], 0
    while found := _LARK_PART.search(grammar, end):
        parts.append(grammar[end : found.start()])
        part, end = found[0], found.end()
        if part.startswith("%json"):
            try:
                _, end = decoder.raw_decode(grammar, found.end())
                schema = json.loads(enforced(grammar[found.end() : end]))
                part = f"%json {json.dumps({**schema, 'x-guidance': _JSON_DEFAULTS})}"
            except _NO_SCHEMA as error:
                raise GrammarError(f"has %json with no JSON schema: {error}") from error
        elif part.startswith("/") and not part.startswith("//"):
            part = ascii_classes(part)
        parts.append(part)
    return "".join(parts) + grammar[end:]


def _of_schema(schema: str) -> str:
    try:
        # A schema cannot ask to have keywords left out in silence.
        return LLMatcher.grammar_from_json_schema(
            enforced(schema), defaults=_JSON_DEFAULTS, overrides={"lenient": False}
        )
    except _NO_SCHEMA as error:
        raise GrammarError(f"is no JSON schema: {error}") from error


def model_vocabulary(
    folder: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> Callable[[], LLTokenizer]:
    """Return a function that reads all tokens of a checkpoint, for masks of the next token.

    It takes a third of a second for 49,152 tokens, during which no other thread runs.
    """

    def make() -> LLTokenizer:
        content = tokenizer_json(folder)
        return LLTokenizer(content, n_vocab=vocab_size, eos_token=list(eos_token_ids))

    return make
