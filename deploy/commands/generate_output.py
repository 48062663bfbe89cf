"""The output of `kvrelay generate`: text, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol

import click

from kvrelay.deploy.errors import DeployError
from kvrelay.v1 import inference_pb2 as pb


class Writer(Protocol):
    """A writer of the events of a request's stream."""

    def delta(self, request_id: str, delta: pb.GenerateDelta) -> None:
        """Write the tokens that came."""
        ...

    def complete(self, request_id: str, complete: pb.GenerateComplete) -> None:
        """Write the completion."""
        ...

    def end(self) -> None:
        """Finish the output of a stream that has ended, with or without the completion."""
        ...


def text_writer(outputs: int) -> Writer:
    """Return the writer that prints a request with this number of outputs as text."""
    return PlainTexts() if outputs > 1 else PlainText()


class PlainText:
    """The text alone on standard output; log-probabilities beside it on standard error."""

    def __init__(self) -> None:
        self._begun = False
        self._prompt = _PromptLogprobs()

    def delta(self, request_id: str, delta: pb.GenerateDelta) -> None:
        """Print what came."""
        self._prompt.say(delta)
        self._begun = True
        print(delta.text, end="", flush=True)  # noqa: T201
        _say_logprobs("", delta.index, delta.logprobs)

    def complete(self, request_id: str, complete: pb.GenerateComplete) -> None:
        """Raise DeployError if the request was aborted, which the text does not show."""
        _raise_if_aborted(request_id, complete)

    def end(self) -> None:
        """End the line, if there is one."""
        if self._begun:
            click.echo()


class PlainTexts:
    """Several texts, whose deltas come interleaved: printed at the end, one after the other."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._prompt = _PromptLogprobs()

    def delta(self, request_id: str, delta: pb.GenerateDelta) -> None:
        """Keep the text that came; print log-probabilities at once."""
        self._texts[delta.choice] = self._texts.get(delta.choice, "") + delta.text
        self._prompt.say(delta)
        _say_logprobs(f"[{delta.choice}]", delta.index, delta.logprobs)

    def complete(self, request_id: str, complete: pb.GenerateComplete) -> None:
        """Raise DeployError if the request was aborted, which the texts do not show."""
        _raise_if_aborted(request_id, complete)

    def end(self) -> None:
        """Print the texts, complete or not."""
        for choice, text in sorted(self._texts.items()):
            click.echo(f"[{choice}]{text}" if text[:1].isspace() else f"[{choice}] {text}")


def _raise_if_aborted(request_id: str, complete: pb.GenerateComplete) -> None:
    ends = [complete.finish_reason, *(choice.finish_reason for choice in complete.choices)]
    if pb.FINISH_REASON_ABORT in ends:
        raise DeployError(f"request {request_id} was aborted")


class _PromptLogprobs:
    """The printer of a prompt's log-probabilities, which come in several deltas."""

    def __init__(self) -> None:
        self._next = 1

    def say(self, delta: pb.GenerateDelta) -> None:
        """Print a line on standard error for each position of the prompt that the delta has."""
        _say_logprobs("prompt", self._next, delta.prompt_logprobs)
        self._next += len(delta.prompt_logprobs)


def _say_logprobs(what: str, first: int, tokens: Iterable[pb.TokenLogprobs]) -> None:
    """Print a line on standard error for each position from `first` on."""
    for position, token in enumerate(tokens, start=first):
        click.echo(_logprob_line(what, position, token), err=True)


def _logprob_line(what: str, position: int, token: pb.TokenLogprobs) -> str:
    top = "".join(f"  {one.token_id}:{one.logprob:.4f}" for one in token.top)
    line = f"{position:>5}  token {token.token_id:>6}  {token.logprob:>9.4f}{top}"
    return f"{what:<6} {line}" if what else line


class JsonLines:
    """One object a line: each delta, then the completion."""

    def delta(self, request_id: str, delta: pb.GenerateDelta) -> None:
        """Print `{"event": "delta", ...}`; log-probabilities only where the server sent some."""
        event: dict[str, Any] = {
            "event": "delta",
            "request_id": request_id,
            "choice": delta.choice,
            "index": delta.index,
            "token_ids": list(delta.token_ids),
            "text": delta.text,
        }
        if delta.logprobs:
            event["logprobs"] = [_logprobs(token) for token in delta.logprobs]
        if delta.prompt_logprobs:
            event["prompt_logprobs"] = [_logprobs(token) for token in delta.prompt_logprobs]
        _write_object(event)

    def complete(self, request_id: str, complete: pb.GenerateComplete) -> None:
        """Print `{"event": "complete", ...}`."""
        usage, timings = complete.usage, complete.timings
        _write_object(
            {
                "event": "complete",
                "request_id": request_id,
                **_end(complete),
                "choices": [_end(choice) for choice in complete.choices],
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "completion_tokens": usage.completion_tokens,
                    "cached_tokens": usage.cached_tokens,
                },
                "timings": {
                    "queue_seconds": timings.queue_seconds,
                    "prefill_seconds": timings.prefill_seconds,
                    "transfer_seconds": timings.transfer_seconds,
                    "decode_seconds": timings.decode_seconds,
                },
                "seed": complete.seed,
            }
        )

    def end(self) -> None:
        """Do nothing: every line is complete."""


def _logprobs(token: pb.TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": token.token_id,
        "logprob": token.logprob,
        "top": [{"token_id": one.token_id, "logprob": one.logprob} for one in token.top],
    }


def _end(end: pb.GenerateComplete | pb.ChoiceEnd) -> dict[str, Any]:
    reason: str = pb.FinishReason.Name(end.finish_reason)
    matched = end.WhichOneof("matched_stop")
    return {
        "finish_reason": reason.removeprefix("FINISH_REASON_").lower(),
        "matched_stop": getattr(end, matched) if matched else None,
    }


def _write_object(event: dict[str, Any]) -> None:
    print(json.dumps(event, ensure_ascii=False), flush=True)  # noqa: T201
