"""Text with calls in it, each behind an opening tag: the code that all such formats share.

A format brings a reader: a generator that reads one block of calls, from behind its opening tag,
and yields wherever it needs more text. So a format is written as if its text were there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Final, Protocol, TypeAlias

from kvrelay.text.output_parsers.held_text import EndingSpace, is_long, overlap
from kvrelay.text.output_parsers.json_calls import is_json
from kvrelay.text.output_parsers.pieces import OutputPiece, all_pieces

_MOST_NAME: Final = 1024
"""The most characters of a call's name, or of whatever else a tag must follow."""
Reading: TypeAlias = Generator[None, None, bool]
"""A reader at work; it returns whether the text since the last whole call is none of content."""


class Source:
    """The text of a block that has come, and is not taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.has_ended = False
        """No more text will come."""
        self.is_cut = False
        """Something else than the model has ended it."""
        self.is_unclosed = False
        """Something else has come in place of the block's closing tag."""
        self.is_text = False
        """If it is cut off here, it is content all the same."""
        self._taken: list[str] = []

    def begin(self, before: str) -> None:
        """Begin a block, behind what stands before its first call."""
        self.is_unclosed = self.is_text = False
        self._taken = [before]

    @property
    def taken(self) -> str:
        """The text that was taken since the last whole call."""
        return "".join(self._taken)

    def settle(self) -> None:
        """Forget the text that was taken: it was a whole call."""
        self._taken = []

    def take(self, number: int) -> str:
        """Take the first characters."""
        taken, self.text = self.text[:number], self.text[number:]
        self._taken.append(taken)
        return taken

    def give_back(self, text: str) -> None:
        """Undo the taking of the last characters."""
        self.text = text + self.text
        self._taken[-1] = self._taken[-1].removesuffix(text)

    def take_with(self, push: Callable[[str], str]) -> None:
        """Take what a function takes, which returns the text behind it."""
        self.take(len(self.text) - len(push(self.text)))

    def until(self, *tags: str, most: int = _MOST_NAME) -> Generator[None, None, tuple[str, str]]:
        """Take the text up to the first of some tags, and the tag; return both.

        The tag is empty if none comes within `most` characters.
        """
        parts: list[str] = []
        length = 0
        while True:
            found = [(at, tag) for tag in tags if (at := self.text.find(tag)) >= 0]
            if found:
                at, tag = min(found)
                parts.append(self.take(at))
                self.take(len(tag))
                return "".join(parts), tag
            possible = max(overlap(self.text, tag) for tag in tags)
            parts.append(self.take(len(self.text) - possible))
            length += len(parts[-1])
            if self.has_ended:  # what was cut off within a tag is no text
                rest = self.take(len(self.text))
                parts.append("" if self.is_cut else rest)
            if self.has_ended or length > most:
                return "".join(parts), ""
            yield

    def skip(self, *tags: str) -> Generator[None, None, str]:
        """Take one of some tags, if it comes next, with white space before it; return it.

        If none does, nothing is taken, and the result is empty. A tag that another begins with
        comes behind that.
        """
        while True:
            bare = self.text.lstrip()
            space = len(self.text) - len(bare)
            for tag in tags:
                if bare.startswith(tag):
                    self.take(space + len(tag))
                    return tag
            may_come = not is_long(space) and any(tag.startswith(bare) for tag in tags)
            if self.has_ended or not may_come:
                return ""
            yield

    def close(self, *tags: str) -> Generator[None, None, None]:
        """Take a block's closing tag, if it comes next, or what there is of it at the end.

        Where the block was cut off, that may be the beginning of something else.
        """
        tag = yield from self.skip(*tags)
        self.is_unclosed = not tag
        is_begun = self.is_cut or any(one.startswith(self.text.lstrip()) for one in tags)
        if self.has_ended and is_begun:
            self.take(len(self.text))

    def next_character(self) -> Generator[None, None, str]:
        """Return the next character that is no white space; empty: none comes.

        White space before it is taken.
        """
        while True:
            self.take(min(len(self.text) - len(self.text.lstrip()), _MOST_NAME))
            if self.text or self.has_ended:
                return self.text[:1]
            yield


class ToldCalls:
    """The numbering of calls, and the pieces of each.

    Args:
        is_whole: tell a call when it is complete, and only if its arguments are JSON.
    """

    def __init__(self, *, is_whole: bool) -> None:
        self.num_begun = 0
        self.in_call = False
        """A call was begun that is not complete."""
        self._is_whole = is_whole
        self._ready: list[OutputPiece] = []
        self._begun: list[OutputPiece] = []
        """The first piece of a call that is held back until it is complete."""
        self._arguments: list[str] = []
        """The arguments that no piece has yet."""
        self._has_arguments = False

    def begin(self, name: str, call_id: str = "") -> None:
        """Begin a call."""
        self.in_call, self._has_arguments = True, False
        begun = OutputPiece(call=self.num_begun, name=name, call_id=call_id)
        (self._begun if self._is_whole else self._ready).append(begun)
        self.num_begun += 1

    def add(self, arguments: str) -> None:
        """Add a part of the call's arguments."""
        if arguments:
            self._arguments.append(arguments)
            self._has_arguments = True

    def end(self) -> bool:
        """End the call; return whether it is one. In a stream it always is."""
        if not self._has_arguments:
            self.add("{}")
        if self._is_whole and not is_json("".join(self._arguments)):
            self.drop()
            return False
        self._ready += self._begun
        self._begun = []
        self._flush()
        self.in_call = False
        return True

    def drop(self) -> bool:
        """Give up the call that was begun, if any; return whether nobody was told of it."""
        is_told = self.in_call and not self._is_whole
        if self.in_call and self._is_whole:
            self.num_begun -= 1
        self._begun, self._arguments = [], []
        self.in_call = False
        return not is_told

    def take(self) -> list[OutputPiece]:
        """Return the pieces that nobody was told of."""
        if not self._is_whole:
            self._flush()
        ready, self._ready = self._ready, []
        return ready

    def _flush(self) -> None:
        if self._arguments:
            arguments = "".join(self._arguments)
            self._ready.append(OutputPiece(call=self.num_begun - 1, arguments=arguments))
            self._arguments = []


Reader: TypeAlias = Callable[[Source, ToldCalls], Reading]


class Opening(Protocol):
    """A search for the beginning of a block in content."""

    def find(self, text: str, *, is_start: bool) -> tuple[int, int] | None:
        """Return the place and the length of the first opening tag; None: there is none."""

    def possible(self, text: str, *, is_start: bool) -> int:
        """Return the number of characters at the end that an opening tag may begin with."""


class Tags:
    """An opening that is one of some tags.

    A tag right behind a backtick is a quoted one.

    Args:
        tags: the tags, none of which begins with another.
    """

    def __init__(self, *tags: str) -> None:
        self._tags = tags

    def find(self, text: str, *, is_start: bool = False) -> tuple[int, int] | None:
        """Return the place and the length of the first opening tag; None: there is none."""
        found = [(at, tag) for tag in self._tags if (at := text.find(tag)) >= 0]
        if not found:
            return None
        at, tag = min(found)
        return at, len(tag)

    def possible(self, text: str, *, is_start: bool = False) -> int:
        """Return the number of characters at the end that an opening tag may begin with."""
        return max(overlap(text, tag) for tag in self._tags)


class BlockParser:
    """A parser of content with blocks of calls in it.

    Args:
        opening: finds where a block begins.
        read: reads a block.
        closes: the closing tags; where a block has ended without one, a later one is no content.
        is_whole: tell a call when it is complete, and only if its arguments are JSON.
    """

    def __init__(
        self, opening: Opening, read: Reader, *closes: str, is_whole: bool = False
    ) -> None:
        self._opening = opening
        self._read = read
        self._closes = Tags(*closes) if closes else None
        self._source = Source()
        self._calls = ToldCalls(is_whole=is_whole)
        self._reading: Reading | None = None
        self._space = EndingSpace()
        self._is_start = True
        """Nothing of the output was taken yet."""
        self._is_quoting = False
        """The latest content ends with a backtick."""

    def push(self, text: str) -> Sequence[OutputPiece]:
        """The pieces that are certain after some more text."""
        self._source.text += text
        return all_pieces(self._step)

    def finish(self, *, is_cut: bool = False) -> Sequence[OutputPiece]:
        """The remaining pieces; a call that was cut off is none."""
        self._source.has_ended, self._source.is_cut = True, is_cut
        return all_pieces(self._step)

    def _step(self, pieces: list[OutputPiece]) -> bool:
        """Take what can be taken of the held text; return whether there may be more."""
        if self._reading is not None:
            return self._step_in_block(self._reading, pieces)
        source = self._source
        found = self._opening.find(source.text, is_start=self._is_start)
        closing = self._closes.find(source.text) if self._closes and source.is_unclosed else None
        if closing is not None and (found is None or closing < found):
            pieces += self._content(self._space.cut(source.text[: closing[0]]))
            source.text = source.text[sum(closing) :]
            source.is_unclosed = self._space.is_long = False
            return True
        if found is not None:
            self._open(*found, pieces)
            return True
        if source.has_ended:
            pieces += self._content(self._last_text())
            source.text = ""
            return False
        # White space waits for what comes: it may be that before a call.
        sure = self._space.cut(source.text[: len(source.text) - self._possible()])
        pieces += self._content(sure)
        source.text = source.text[len(sure) :]
        return False

    def _possible(self) -> int:
        """The characters at the end of the held text that a tag may begin with."""
        text = self._source.text
        possible = self._opening.possible(text, is_start=self._is_start)
        if self._closes is not None and self._source.is_unclosed:
            possible = max(possible, self._closes.possible(text))
        return possible

    def _last_text(self) -> str:
        """The held text at the end; the beginning of a tag is none of it if it was cut off."""
        text = self._source.text
        if not self._source.is_cut:
            return text
        possible = self._opening.possible(text, is_start=self._is_start)
        is_tag = possible > 1 or (possible and self._calls.num_begun)
        return text[: len(text) - possible].rstrip() if is_tag else text

    def _open(self, at: int, length: int, pieces: list[OutputPiece]) -> None:
        """Begin a block at its opening tag, or take the tag as content if it is quoted."""
        source = self._source
        is_quoted = source.text[at - 1] == "`" if at else self._is_quoting
        length = max(length, 1) if is_quoted else length
        said = source.text[: at + length] if is_quoted else self._space.cut(source.text[:at])
        pieces += self._content(said)
        source.text, before = source.text[at + length :], source.text[len(said) : at + length]
        self._space.is_long = False
        if not is_quoted:
            self._is_start = False
            source.begin(before)
            self._reading = self._read(source, self._calls)

    def _step_in_block(self, reading: Reading, pieces: list[OutputPiece]) -> bool:
        source = self._source
        try:
            next(reading)
        except StopIteration as end:
            is_read: bool = end.value
        else:
            pieces += self._calls.take()
            return False
        self._reading = None
        pieces += self._calls.take()
        if is_read:
            return bool(source.text)
        is_untold = self._calls.drop()
        if source.has_ended and (not is_untold or (source.is_cut and not source.is_text)):
            source.text = ""
        elif is_untold:
            pieces += self._content(source.taken)
        return True

    def _content(self, text: str) -> list[OutputPiece]:
        """The content; short white space between calls does not count."""
        if text:
            self._is_start, self._is_quoting = False, text[-1] == "`"
        between = self._calls.num_begun and not self._space.is_long
        if not text or (between and not text.strip()):
            return []
        return [OutputPiece(content=text)]
