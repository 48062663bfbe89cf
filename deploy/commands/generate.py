"""`kvrelay generate`: one prompt is sent, and its text is printed as it comes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from kvrelay.client import Client, ClientError, Stream
from kvrelay.client.known_routers import RETRY_SECONDS
from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.commands.generate_output import JsonLines, Writer, text_writer
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.reach.grpc_target import CommandAccess, with_access, with_servers
from kvrelay.deploy.stop_signals import StopSignals
from kvrelay.v1 import inference_pb2 as pb

_FIELDS: Final = {"top_logprobs": "logprobs"}
"""The fields of SamplingParams whose options have other names."""


@click.command()
@click.argument("prompt")
@click.option("--max-tokens", type=int, help="The most output tokens.")
@click.option("--min-tokens", type=int, help="Do not stop before this many output tokens.")
@click.option(
    "--temperature", type=float, help="Sampling temperature; 0 takes the likeliest token."
)
@click.option(
    "--top-p",
    type=float,
    help="Sample from the likeliest tokens whose probabilities add up to this.",
)
@click.option("--top-k", type=int, help="Sample from this many of the likeliest tokens.")
@click.option(
    "--min-p",
    type=float,
    help="Leave out tokens that are less likely than this part of the likeliest one.",
)
@click.option(
    "--frequency-penalty",
    type=float,
    help="Lower a token's logit by this for each time that it has been generated.",
)
@click.option(
    "--presence-penalty",
    type=float,
    help="Lower a token's logit by this once it has been generated.",
)
@click.option(
    "--repetition-penalty",
    type=float,
    help="Divide the logits of tokens in the prompt and the output by this.",
)
@click.option(
    "--seed", type=int, help="The same seed gives the same text; below float32 only up to rounding."
)
@click.option("--stop", multiple=True, help="End the output before this text; may be repeated.")
@click.option(
    "--ignore-eos", is_flag=True, default=None, help="Go on after the end-of-sequence token."
)
@click.option(
    "--logprobs",
    is_flag=True,
    help="Print the tokens' log-probabilities: in the deltas of --json, or on standard error.",
)
@click.option(
    "--top-logprobs",
    type=int,
    metavar="N",
    help="Print those of the N likeliest tokens at each position, too.",
)
@click.option(
    "--prompt-logprobs",
    type=int,
    metavar="N",
    help="Print the log-probabilities of the prompt's tokens, and of the N likeliest at each.",
)
@click.option("--n", type=int, help="The number of outputs; each is sampled for itself.")
@click.option(
    "--no-speculate",
    "speculate",
    flag_value=False,
    default=None,
    help="Do not use speculation where the server would; the text is the same.",
)
@click.option(
    "--request-id", default="", help="The request's id; without it the server chooses one."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Give up after so many seconds; the server then ends the request, too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@with_servers
@with_clear_errors
@with_access
def generate(
    *,
    debug: bool,
    prompt: str,
    request_id: str,
    as_json: bool,
    servers: Sequence[Address],
    access: CommandAccess,
    timeout: float | None,
    logprobs: bool,
    top_logprobs: int | None,
    **sampling: Any,
) -> None:
    """Continue PROMPT; `-` reads it from standard input.

    The server has defaults for the options that are not given. Ctrl-C aborts the request.
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    sampling["top_logprobs"] = 0 if logprobs and top_logprobs is None else top_logprobs
    request = pb.GenerateRequest(
        request_id=request_id, text=prompt, sampling_params=sampling_params(sampling)
    )
    writer = JsonLines() if as_json else text_writer(request.sampling_params.n)
    for server in servers:
        access.check(server)
    # One router has nobody to take its place: it is shown at once what is wrong.
    retry_seconds = RETRY_SECONDS if len(servers) > 1 else 0.0
    with StopSignals() as signals:
        signals.stopping()  # raised in the middle of gRPC, an exception may be lost
        with Client(list(map(str, servers)), access, retry_seconds=retry_seconds) as client:
            stream = client.generate(request, timeout_seconds=timeout)
            signals.deliver_to(stream.cancel)
            if signals.received is not None:
                stream.cancel()
            write(stream, writer, signals)


def sampling_params(given: dict[str, Any]) -> pb.SamplingParams:
    """The options as a message; one that is None is not sent.

    Raises click.BadParameter, naming the option, for a number that its field cannot hold.
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


def write(stream: Stream, writer: Writer, signals: StopSignals) -> None:
    """Write a stream's events as they come; exit if a signal has cancelled it.

    Raises DeployError if it fails.
    """
    try:
        for response in stream:
            if response.HasField("delta"):
                writer.delta(response.request_id, response.delta)
            else:
                writer.complete(response.request_id, response.complete)
    except ClientError as error:
        if signals.received is None:
            raise DeployError(str(error)) from error
        click.echo("aborted", err=True)
        sys.exit(128 + signals.received)
    finally:
        writer.end()
