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
"""The longest grammar, in whatever form."""
WORKER_STACK_BYTES: Final = 256 << 20
"""The stack of the thread that compiles: llguidance recurses as deep as a grammar's rules do."""
_MOST_KEPT: Final = 128
_MOST_KEPT_BYTES: Final = 512 << 20
LEAST_BYTES: Final = 64 << 10
_MOST_BYTES: Final = 128 << 20
"""The bounds of the estimate of what one grammar occupies (`LEAST_BYTES`, `_MOST_BYTES`)."""
_JSON_DEFAULTS: Final[Any] = {"whitespace_pattern": r"\x20|\n\x20{0,32}"}
"""White space in JSON: one space, or a line break and its indentation.

With more allowed, a weak model would go on with white space.
"""
_OPTIONS: Final = "x-guidance"
_BYTES: Final = 256


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
        fuel: the work that a grammar may take to compile, as a share of what llguidance allows.
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
        """The compiled grammar, in its initial state; raises `GrammarError`, without a place."""
        matcher = self._matcher(source_of(constraint))
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        return matcher

    def place_of(self, problem: str, schema: str, may_try: Callable[[], bool]) -> str:
        """The place of `compile`'s problem in a schema; asks `may_try` before each trial."""

        def fails(part: str) -> bool:
            return may_try() and one_line(self._matcher(_of_schema(part)).get_error()) == problem

        return find_place(schema, fails)

    def _matcher(self, source: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)


class _Compilation(Future[LLMatcher]):
    """The future of a compiled grammar.

    Args:
        constraint: the constraint to compile.
    """

    def __init__(self, constraint: Constraint) -> None:
        super().__init__()
        self.constraint = constraint
        self.num_bytes = LEAST_BYTES
        """The estimated memory of the compiled grammar."""


class Grammars:
    """A cache of grammars, compiled in a thread with a large stack. Any thread may call it.

    The latest are kept; any other lives as long as a request holds its future. So the number of
    grammars is bounded. A grammar that no request holds any more when its turn comes is not
    compiled.

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
        self._is_started = False
        self.on_compiled: Callable[[float], object] = lambda seconds: None
        """A callback in the thread, with the seconds of each compilation."""
        self.on_hit: Callable[[], object] = lambda: None
        """A callback for each grammar that was there already."""

    def prepare(self, constraint: Constraint) -> Future[LLMatcher]:
        """The future of the compiled grammar in its initial state; do not change its state.

        The future raises `GrammarError` if the grammar cannot be used. Hold it as long as the
        grammar is needed. Do not cancel it: others may wait for the same future.
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
        """Start the thread. Its stack takes only address space until it is used."""
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
        """The compiled grammar, and the estimate of its memory in bytes."""
        before = _resident_bytes()
        matcher = self._compiler.compile(constraint)
        # Memory that other threads take meanwhile counts, too: so the estimate has bounds.
        return matcher, min(max(_resident_bytes() - before, LEAST_BYTES), _MOST_BYTES)

    def _settle(self, made: _Compilation, begun: float) -> None:
        self.on_compiled(time.monotonic() - begun)
        with self._lock:
            self._keep(made)

    def _keep(self, compiled: _Compilation) -> None:
        """Keep a compiled grammar, and drop the oldest beyond the bounds. Under the lock."""
        self._kept[compiled.constraint] = compiled
        self._kept.move_to_end(compiled.constraint)
        total = sum(one.num_bytes for one in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > _MOST_KEPT or total > _MOST_KEPT_BYTES):
            _, oldest = self._kept.popitem(last=False)
            total -= oldest.num_bytes


@contextlib.contextmanager
def stack_of(num_bytes: int) -> Iterator[None]:
    """Give threads that are started meanwhile stacks of this size."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)


def one_line(error: str) -> str:
    """The message for an error of llguidance, on one line."""
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
    """Raise `GrammarError` if a schema in a grammar sets options, which `_of_schema` forbids.

    A schema that Python cannot read may still be JSON to llguidance, so it is refused. Schemas are
    read only if the grammar could name the option, each part once or twice.
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
    """Return a function that reads all tokens of a checkpoint, for masks of the next token.

    It takes a third of a second for 49,152 tokens, during which no other thread runs.
    """

    def make() -> LLTokenizer:
        content = (folder / "tokenizer.json").read_text()
        return LLTokenizer(content, n_vocab=vocab_size, eos_token=list(eos_token_ids))

    return make


class _Bytes:
    """A vocabulary of single bytes and special tokens, in the form that llguidance asks for."""

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
    """The special tokens that a grammar may name."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special]


def byte_vocabulary(special: Sequence[str]) -> Callable[[], LLTokenizer]:
    """Return a function that makes a vocabulary of bytes, at once: enough to check a grammar."""

    def make() -> LLTokenizer:
        return LLTokenizer(_Bytes(special or ["<end>"]), slices=[])  # type: ignore[arg-type]

    return make
