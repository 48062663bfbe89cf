"""The answers to calls for completions: the chunks of a stream, or one object.

Only the text of a chunk varies; the bytes around it are known from the start. Encoding the text
takes a tenth of a microsecond, `json.dumps` of the whole takes two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final, Protocol

from kvrelay.router.doors.http.chat_parts import Spoken, ToldReasoning
from kvrelay.router.doors.http.logprobs_answer import (
    ChatLogprobs,
    CompletionLogprobs,
    LogprobsWriter,
    PromptLogprobs,
    TokenNames,
)
from kvrelay.router.errors import InvalidField
from kvrelay.router.requests.events import ChoiceEnd, Completion, Delta, Event, FinishReason
from kvrelay.router.requests.request_trace import CHAT, COMPLETION
from kvrelay.text.output_parsers.pieces import MakeParser
from kvrelay.text.output_parsers.tool_format import new_call_id
from kvrelay.wire.output import SampledToken

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": keep-alive\n\n"
"""The bytes of a stream that say nothing."""
_LARGE_BYTES: Final = 1 << 20
_BYTES_OF_AN_ID: Final = 8
"""The estimated bytes of a token id in an answer."""


class Style(Protocol):
    """The form of the answers of one of the two endpoints."""

    prefix: str
    """The prefix of a call's id."""
    operation: str
    """The operation's name in spans."""
    chunk_object: str
    whole_object: str
    no_text: str
    """The member of a chunk that says why a choice ended, in place of `text_of_chunk`."""
    prompt_on_top: bool
    """Whether the members about the prompt stand beside the choices, not in them."""

    def opening(self) -> str | None:
        """Return the first chunk's members beside its text; None: a choice has no such chunk."""

    def text_of_chunk(self, text: str) -> str:
        """Return the member of a chunk's choice that has a text, which is quoted already."""

    def text_of_whole(self, text: str) -> str:
        """Return the member of the whole answer's choice that has a text, which is quoted."""

    def logprobs(self, shown: Shown, alternatives: int, prompt_text: str) -> LogprobsWriter:
        """Return a writer of a choice's log-probabilities.

        Args:
            shown: the parts of the answer.
            alternatives: the number of alternatives of each output token.
            prompt_text: the text of an echoed prompt.
        """


class CompletionStyle:
    """The style of /v1/completions."""

    prefix = "cmpl"
    operation = COMPLETION
    chunk_object = whole_object = "text_completion"
    no_text = '"text":""'
    prompt_on_top = False

    def opening(self) -> str | None:
        """Return None: completions have no opening chunk."""
        return None

    def text_of_chunk(self, text: str) -> str:
        """Return the member with the text."""
        return f'"text":{text}'

    def text_of_whole(self, text: str) -> str:
        """Return the member with the text."""
        return f'"text":{text}'

    def logprobs(self, shown: Shown, alternatives: int, prompt_text: str) -> LogprobsWriter:
        """Return a writer of four lists."""
        return CompletionLogprobs(
            shown.names,
            alternatives,
            shown.names.lengths(skip_special_tokens=shown.skip_special_tokens),
            shown.names.lengths_in(prompt_text),
        )


class ChatStyle:
    """The style of /v1/chat/completions."""

    prefix = "chatcmpl"
    operation = CHAT
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    no_text = '"delta":{}'
    prompt_on_top = True

    def opening(self) -> str | None:
        """Return the member that says who speaks."""
        return '"delta":{"role":"assistant","content":""}'

    def text_of_chunk(self, text: str) -> str:
        """Return the member with a piece of the message."""
        return f'"delta":{{"content":{text}}}'

    def text_of_whole(self, text: str) -> str:
        """Return the member with the message."""
        return f'"message":{{"role":"assistant","content":{text}}}'

    def logprobs(self, shown: Shown, alternatives: int, prompt_text: str) -> LogprobsWriter:
        """Return a writer of an object for each token."""
        return ChatLogprobs(shown.names, alternatives)


@dataclass(frozen=True, slots=True)
class Shown:
    """The parts of an answer beside the text of each choice."""

    names: TokenNames
    logprobs: int | None = None
    """The number of alternatives of each output token; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt, in vLLM's form; None: no log-probabilities."""
    echo: bool = False
    """Whether the text and its log-probabilities begin with the prompt's."""
    output: bool = True
    """Whether generated output is shown; False: only the prompt's part is."""
    token_ids: bool = False
    """Whether the token ids of prompt and output are shown."""
    continuous_usage: bool = False
    """Whether every chunk has the usage so far."""
    parser: MakeParser | None = None
    """A function that makes a parser of one choice's text; None: all of it is content."""
    new_call_id: Callable[[str, int], str] = new_call_id
    """A function that makes the id of a call, by its name and number."""
    reasoning: ToldReasoning = ToldReasoning.AS_IT_COMES
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    stop_token_ids: Sequence[int] = ()
    """The stop tokens that the client has named; where another ends an output, it ended itself."""
    ends_by_calls: bool = True
    """Whether a choice with tool calls has the finish reason `tool_calls`."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The contribution of one prompt to an answer."""

    first_choice: int
    """The index of its first choice in the whole answer."""
    n: int
    """The number of its choices."""
    input_ids: Sequence[int]
    text: str = ""
    """The prompt's text, if it is echoed; else empty."""


@dataclass(frozen=True)
class CompletionAnswer:
    """The members that all parts of one call's answer share."""

    style: Style
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> str:
        """Return the beginning of an object of this kind, open for its choices."""
        return (
            f'{{"id":{quoted(self.id)},"object":"{kind}","created":{self.created},'
            f'"model":{quoted(self.model)},"choices":['
        )


class _Choices:
    """The choices of one prompt: the code that both forms of an answer share."""

    _is_whole = False
    """Whether the answer is sent at once."""

    def __init__(self, answer: CompletionAnswer, prompt: PromptPart, shown: Shown) -> None:
        self._style = answer.style
        self._prompt = prompt
        self._shown = shown
        self._writers: list[LogprobsWriter] = []
        self._prompt_writer: PromptLogprobs | None = None
        self._spoken: list[Spoken] = []
        if shown.parser is not None:
            make = shown.parser
            self._spoken = [
                Spoken(make(self._is_whole), shown.new_call_id, shown.reasoning)
                for _ in range(prompt.n)
            ]
        if shown.logprobs is not None:
            number = shown.logprobs
            self._writers = [
                answer.style.logprobs(shown, number, prompt.text) for _ in range(prompt.n)
            ]
            if shown.echo:
                for writer in self._writers:
                    writer.add_first(prompt.input_ids[0])
        if shown.prompt_logprobs is not None:
            self._prompt_writer = PromptLogprobs(shown.names, shown.prompt_logprobs)

    @property
    def reasoning_tokens(self) -> int | None:
        """The output tokens that are reasoning; None: it is not looked for."""
        if not self._spoken:
            return None
        return sum([one.reasoning_tokens for one in self._spoken])

    def _take_prompt(self, tokens: Sequence[SampledToken]) -> int:
        """Take tokens of the prompt; return their bytes in a whole answer."""
        num_bytes = 0
        if self._prompt_writer is not None:
            num_bytes += self._prompt_writer.add(tokens)
        if self._shown.echo and self._writers:
            written = self._writers[0].write_prompt(tokens)
            num_bytes += sum([writer.add(written) for writer in self._writers])
        return num_bytes

    def _add(self, choice: int, tokens: Sequence[SampledToken]) -> int:
        """Take output tokens; return the bytes of their log-probabilities."""
        if not self._writers:
            return 0
        writer = self._writers[choice]
        return writer.add(writer.write(tokens))

    def _reason(self, choice: int, end: ChoiceEnd) -> str:
        """Return why a choice ended; as in vLLM, `stop_reason` names the client's stop if any.

        A choice that has ended in its reasoning says so.
        """
        if not self._shown.output and end.finish_reason is not FinishReason.ABORT:
            end = _NOTHING_SHOWN
        reason = str(end.finish_reason)
        called = self._spoken and self._spoken[choice].has_calls and self._shown.ends_by_calls
        if called and end.finish_reason is FinishReason.STOP:
            reason = "tool_calls"
        stop = end.matched_stop
        if isinstance(stop, int) and stop not in self._shown.stop_token_ids:
            stop = None
        unclosed = self._spoken and self._spoken[choice].is_unclosed
        more = ',"ended_in_reasoning":true' if unclosed else ""
        return f'"finish_reason":"{reason}","stop_reason":{json.dumps(stop)}{more}'

    def _logprobs(self, choice: int) -> str:
        return self._writers[choice].take() if self._writers else "null"

    def _of_prompt(self, choice: int) -> str:
        """Return the members about the prompt, each after a comma, which its first choice has."""
        members = ""
        if choice:
            return members
        if self._shown.token_ids:
            members += f',"prompt_token_ids":{json.dumps(list(self._prompt.input_ids))}'
        if self._prompt_writer is not None:
            members += f',"prompt_logprobs":{self._prompt_writer.take()}'
        return members


_NOTHING_SHOWN: Final = ChoiceEnd(FinishReason.LENGTH, None)


def is_cut(end: ChoiceEnd) -> bool:
    """Return whether something else than the model has ended an output."""
    return end.finish_reason is not FinishReason.STOP or isinstance(end.matched_stop, str)


def _of_prompt_alone(delta: Delta) -> Delta:
    return replace(delta, tokens=(), text="")


class Chunks(_Choices):
    """The chunks of one prompt's choices: the `Form` of a streamed answer.

    Args:
        answer: the answer that the chunks belong to.
        prompt: the prompt of the choices.
        shown: the parts that are shown beside the text.
    """

    def __init__(self, answer: CompletionAnswer, prompt: PromptPart, shown: Shown) -> None:
        super().__init__(answer, prompt, shown)
        self._head = f"data: {answer.head(answer.style.chunk_object)}"
        self._begun: set[int] = set()
        self._output_tokens = [0] * prompt.n

    def __call__(self, event: Event) -> bytes:
        """Return the chunks of an event, as events of a text/event-stream."""
        if isinstance(event, Delta):
            shown = event if self._shown.output else _of_prompt_alone(event)
            self._output_tokens[event.choice] += len(shown.tokens)
            return self._delta(shown).encode()
        ends = enumerate(event.choices)
        return "".join([self._end(choice, end) for choice, end in ends]).encode()

    def _delta(self, delta: Delta) -> str:
        choice, text, beginning = delta.choice, delta.text, ""
        if delta.prompt_logprobs:
            self._take_prompt(delta.prompt_logprobs)
            return ""
        extra = ""
        if choice not in self._begun:
            beginning = self._beginning(choice)
            text = self._prompt.text + text
        if self._shown.token_ids:
            ids = json.dumps([token.token_id for token in delta.tokens])
            extra = f',"token_ids":{ids}'
        self._add(choice, delta.tokens)
        if self._spoken:
            return beginning + self._spoken_delta(choice, text, len(delta.tokens), extra)
        words = self._style.text_of_chunk(quoted(text)) + extra
        return beginning + self._chunk(choice, words, logprobs=self._logprobs(choice))

    def _spoken_delta(self, choice: int, text: str, num_tokens: int, extra: str) -> str:
        """Return a chunk for each part that a text completes; the first has its tokens' members."""
        first, *others = self._spoken[choice].push(text, num_tokens) or [""]
        shows_tokens = extra or self._writers or self._shown.continuous_usage
        if not first and not shows_tokens:
            return ""
        words = (first or self._style.no_text) + extra
        chunk = self._chunk(choice, words, logprobs=self._logprobs(choice))
        return chunk + "".join([self._chunk(choice, words) for words in others])

    def _beginning(self, choice: int) -> str:
        """Return the chunk before a choice's first token; empty if it has none."""
        self._begun.add(choice)
        opening, of_prompt = self._style.opening(), self._of_prompt(choice)
        if opening is None and not of_prompt:
            return ""
        return self._chunk(choice, opening or self._style.no_text, of_prompt=of_prompt)

    def _end(self, choice: int, end: ChoiceEnd) -> str:
        beginning = "" if choice in self._begun else self._beginning(choice)
        if self._spoken:
            last = [
                self._chunk(choice, words)
                for words in self._spoken[choice].finish(is_cut=is_cut(end))
            ]
            beginning += "".join(last)
        return beginning + self._chunk(choice, self._style.no_text, self._reason(choice, end))

    def _chunk(
        self,
        choice: int,
        words: str,
        reason: str = '"finish_reason":null',
        logprobs: str = "null",
        of_prompt: str = "",
    ) -> str:
        index, on_top = self._prompt.first_choice + choice, ""
        if self._style.prompt_on_top:
            on_top, of_prompt = of_prompt, ""
        if self._shown.continuous_usage:
            tokens = self._output_tokens[choice]
            on_top += f',"usage":{usage_of(len(self._prompt.input_ids), tokens)}'
        return (
            f'{self._head}{{"index":{index},{words},"logprobs":{logprobs},{reason}{of_prompt}}}]'
            f"{on_top}}}\n\n"
        )


class HeldAnswer:
    """A bound on the bytes that one call's answer holds before it is sent.

    Args:
        most_bytes: the most bytes of all its prompts together.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0

    @property
    def is_large(self) -> bool:
        """Whether joining and sending all of it at once would hold up the event loop."""
        return self._num_bytes > _LARGE_BYTES

    def add(self, num_bytes: int) -> None:
        """Add to the count of bytes."""
        self._num_bytes += num_bytes

    async def check(self, _event: bytes) -> None:
        """Raise `InvalidField` if there are too many bytes."""
        if self._num_bytes > self._most_bytes:
            raise InvalidField(
                "stream",
                f"the answer has more than {self._most_bytes} bytes (--max-unread-bytes): "
                "ask for fewer log-probabilities or choices, or for a stream",
            )


class Whole(_Choices):
    """The choices of one prompt, collected: the `Form` of an answer that is sent at once.

    Args:
        answer: the answer that the choices belong to.
        prompt: the prompt of the choices.
        shown: the parts that are shown beside the text.
        held: counts the collected bytes.
    """

    _is_whole = True

    def __init__(
        self, answer: CompletionAnswer, prompt: PromptPart, shown: Shown, held: HeldAnswer
    ) -> None:
        super().__init__(answer, prompt, shown)
        self._texts: list[list[str]] = [[prompt.text] for _ in range(prompt.n)]
        self._ids: list[list[int]] = [[] for _ in range(prompt.n)]
        self._held = held
        held.add(prompt.n * len(prompt.text))
        if shown.token_ids:
            held.add(_BYTES_OF_AN_ID * len(prompt.input_ids))

    def __call__(self, event: Event) -> bytes:
        """Return nothing: no part of the answer is sent before the end."""
        if isinstance(event, Delta):
            of_prompt = event.prompt_logprobs
            if of_prompt:
                self._held.add(self._take_prompt(of_prompt))
            elif self._shown.output:
                self._held.add(self._take(event))
        return b""

    def _take(self, delta: Delta) -> int:
        """Take output; return its approximate bytes in the answer."""
        choice = delta.choice
        if self._spoken:
            self._spoken[choice].take(delta.text, len(delta.tokens))
        else:
            self._texts[choice].append(delta.text)
        num_bytes = len(delta.text) + self._add(choice, delta.tokens)
        if self._shown.token_ids:
            self._ids[choice] += [token.token_id for token in delta.tokens]
            num_bytes += _BYTES_OF_AN_ID * len(delta.tokens)
        return num_bytes

    def choices(self, completion: Completion) -> Iterator[str]:
        """Yield each choice as JSON."""
        for choice, end in enumerate(completion.choices):
            yield self._choice(choice, end)

    @property
    def on_top(self) -> str:
        """The members beside the choices, each with a comma before it."""
        return self._of_prompt(0) if self._style.prompt_on_top else ""

    def _choice(self, choice: int, end: ChoiceEnd) -> str:
        if self._spoken:
            words = self._spoken[choice].message(is_cut=is_cut(end))
        else:
            words = self._style.text_of_whole(quoted("".join(self._texts[choice])))
        extra = ""
        if self._shown.token_ids:
            extra += f',"token_ids":{json.dumps(self._ids[choice])}'
        if not self._style.prompt_on_top:
            extra += self._of_prompt(choice)
        index, logprobs = self._prompt.first_choice + choice, self._logprobs(choice)
        reason = self._reason(choice, end)
        return f'{{"index":{index},{words},"logprobs":{logprobs},{reason}{extra}}}'


def usage_of(
    prompt_tokens: int,
    output_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> str:
    """Return a usage object."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return json.dumps(usage)


def _usage_of_all(completions: Sequence[Completion], forms: Sequence[_Choices]) -> str:
    """Return the usage of all prompts of a call together."""
    reasoning = [one.reasoning_tokens for one in forms]
    return usage_of(
        sum(one.prompt_tokens for one in completions),
        sum(one.completion_tokens for one in completions),
        sum(one.cached_tokens for one in completions),
        None if None in reasoning else sum(one or 0 for one in reasoning),
    )


def usage_chunk(
    answer: CompletionAnswer, chunks: Sequence[Chunks], completions: Sequence[Completion]
) -> bytes:
    """Return the last chunk of a stream whose client asked for usage."""
    head = answer.head(answer.style.chunk_object)
    return f'data: {head}],"usage":{_usage_of_all(completions, chunks)}}}\n\n'.encode()


def parts_of_whole(
    answer: CompletionAnswer, wholes: Sequence[Whole], completions: Sequence[Completion]
) -> Iterator[bytes]:
    """Yield an answer that is not streamed in parts: one for each choice, and its frame."""
    before = answer.head(answer.style.whole_object)
    for whole, completion in zip(wholes, completions, strict=True):
        for choice in whole.choices(completion):
            yield f"{before}{choice}".encode()
            before = ","
    on_top = "".join([whole.on_top for whole in wholes])
    yield f']{on_top},"usage":{_usage_of_all(completions, wholes)}}}'.encode()
