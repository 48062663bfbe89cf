"""`kvrelay generate`: one prompt, its text as it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, Protocol

import click

from kvrelay.deploy.address import Address
from kvrelay.deploy.client import Access, connected, with_access
from kvrelay.deploy.edge import with_clear_errors
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options import DEFAULT_GRPC
from kvrelay.deploy.params import ADDRESS
from kvrelay.v1 import inference_pb2 as pb

_INTERRUPTED = 130
_FIELDS = {"top_logprobs": "logprobs"}
"""The wire's names, where the options' are others."""


@click.command()
@click.argument("prompt")
@click.option("--max-tokens", type=int, help="Output tokens at most.")
@click.option("--min-tokens", type=int, help="No stop before this many output tokens.")
@click.option("--temperature", type=float, help="0 is greedy.")
@click.option("--top-p", type=float, help="Sample from the likeliest tokens of this total.")
@click.option("--top-k", type=int, help="Sample from this many likeliest tokens.")
@click.option(
    "--min-p", type=float, help="Leave out tokens less likely than this, to the likeliest."
)
@click.option("--frequency-penalty", type=float, help="For each time a token has come.")
@click.option("--presence-penalty", type=float, help="For a token that has come at all.")
@click.option("--repetition-penalty", type=float, help="Divides the logits of tokens seen.")
@click.option(
    "--seed", type=int, help="The same seed gives the same text; below float32 only up to rounding."
)
@click.option("--stop", multiple=True, help="End before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end of sequence.")
@click.option(
    "--logprobs",
    is_flag=True,
    help="Log-probabilities of the tokens, in --json's deltas or on standard error.",
)
@click.option(
    "--top-logprobs", type=int, metavar="N", help="Those of the N likeliest at each place, too."
)
@click.option(
    "--prompt-logprobs",
    type=int,
    metavar="N",
    help="Log-probabilities of the prompt's tokens, and of the N likeliest at each place.",
)
@click.option("--n", type=int, help="Outputs, each drawn for itself.")
@click.option(
    "--no-speculate",
    "speculate",
    flag_value=False,
    default=None,
    help="Do not draft, where the server would; the text is the same.",
)
@click.option("--request-id", default="", help="Chosen by the server when not given.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--server", type=ADDRESS, default=str(DEFAULT_GRPC), show_default=True)
@with_clear_errors
@with_access
def generate(
    *,
    debug: bool,
    prompt: str,
    request_id: str,
    as_json: bool,
    server: Address,
    access: Access,
    logprobs: bool,
    top_logprobs: int | None,
    **sampling: Any,
) -> None:
    """Continue PROMPT; `-` reads it from standard input.

    What is not given is left to the server. Ctrl-C aborts the request.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    sampling["top_logprobs"] = 0 if logprobs and top_logprobs is None else top_logprobs
    request = pb.GenerateRequest(
        request_id=request_id, text=prompt, sampling_params=sampling_params(sampling)
    )
    writer: Writer = JsonLines() if as_json else _text_writer(request)
    access.check(server)
    with connected(server, access.credentials()) as service:
        stream_to(writer, service.Generate(request, metadata=access.metadata))


def sampling_params(given: dict[str, Any]) -> pb.SamplingParams:
    """The wire's form of the options; what is None is not sent.

    Raises DeployError, naming the option, for a number that its field cannot hold.
    """
    params = pb.SamplingParams()
    for name, value in given.items():
        if value is None:
            continue
        field = _FIELDS.get(name, name)
        try:
            if isinstance(value, tuple):
                getattr(params, field).extend(value)
            else:
                setattr(params, field, value)
        except ValueError as error:
            option = "--" + name.replace("_", "-")
            raise click.BadParameter(str(error), param_hint=option) from error
    return params


class Writer(Protocol):
    """Writes what a request streams."""

    def delta(self, request_id: str, delta: pb.GenerateDelta) -> None:
        """Tokens that came."""
        ...

    def complete(self, request_id: str, complete: pb.GenerateComplete) -> None:
        """The completion."""
        ...

    def end(self) -> None:
        """Nothing follows, be it complete or not."""
        ...


def stream_to(writer: Writer, call: Any) -> None:
    """Write a call's events as they come; Ctrl-C cancels the call and exits.

    Raises DeployError if the stream ends without a completion.
    """
    completed = False
    try:
        for response in call:
            if response.WhichOneof("event") == "delta":
                writer.delta(response.request_id, response.delta)
            else:
                writer.complete(response.request_id, response.complete)
                completed = True
    except KeyboardInterrupt:
        call.cancel()
        click.echo("aborted", err=True)
        sys.exit(_INTERRUPTED)
    finally:
        writer.end()
    if not completed:
        raise DeployError("the stream ended without a completion")


def _text_writer(request: pb.GenerateRequest) -> Writer:
    return PlainTexts() if request.sampling_params.n > 1 else PlainText()


class PlainText:
    """The text alone on standard output; log-probabilities beside it on standard error."""

    def __init__(self) -> None:
        self._begun = False

    def delta(self, request_id: str, delta: pb.GenerateDelta) -> None:
        """Print what came, at once."""
        _say_logprobs("prompt", 1, delta.prompt_logprobs)
        self._begun = True
        print(delta.text, end="", flush=True)  # noqa: T201
        _say_logprobs("", delta.index, delta.logprobs)

    def complete(self, request_id: str, complete: pb.GenerateComplete) -> None:
        """Say of an abort, which the text does not show."""
        _raise_if_aborted(request_id, complete)

    def end(self) -> None:
        """End the line, if there is one."""
        if self._begun:
            click.echo()


class PlainTexts:
    """Several texts, which come at once: one after the other when all are here, each headed."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def delta(self, request_id: str, delta: pb.GenerateDelta) -> None:
        """Keep what came; log-probabilities do not wait."""
        self._texts[delta.choice] = self._texts.get(delta.choice, "") + delta.text
        _say_logprobs("prompt", 1, delta.prompt_logprobs)
        _say_logprobs(f"[{delta.choice}]", delta.index, delta.logprobs)

    def complete(self, request_id: str, complete: pb.GenerateComplete) -> None:
        """Say of an abort, which the texts do not show."""
        _raise_if_aborted(request_id, complete)

    def end(self) -> None:
        """Print what there is, be it complete or not."""
        for choice, text in sorted(self._texts.items()):
            click.echo(f"[{choice}]{text}" if text[:1].isspace() else f"[{choice}] {text}")


def _raise_if_aborted(request_id: str, complete: pb.GenerateComplete) -> None:
    ends = [complete.finish_reason, *(choice.finish_reason for choice in complete.choices)]
    if pb.FINISH_REASON_ABORT in ends:
        raise DeployError(f"request {request_id} was aborted")


def _say_logprobs(what: str, first: int, tokens: Iterable[pb.TokenLogprobs]) -> None:
    """A line on standard error for each position from `first` on."""
    for position, token in enumerate(tokens, start=first):
        click.echo(_logprob_line(what, position, token), err=True)


def _logprob_line(what: str, position: int, token: pb.TokenLogprobs) -> str:
    top = "".join(f"  {one.token_id}:{one.logprob:.4f}" for one in token.top)
    line = f"{position:>5}  token {token.token_id:>6}  {token.logprob:>9.4f}{top}"
    return f"{what:<6} {line}" if what else line


class JsonLines:
    """One object a line: each delta, then the completion."""

    def delta(self, request_id: str, delta: pb.GenerateDelta) -> None:
        """``{"event": "delta", ...}``; log-probabilities only where the server sent some."""
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
        """``{"event": "complete", ...}``."""
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
        """Every line has its end already."""


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
