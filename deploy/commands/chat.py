"""`kvrelay chat`: a conversation in a terminal, over HTTP, which applies the chat template."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final

import aiohttp
import click

from kvrelay.deploy.command_errors import with_clear_errors
from kvrelay.deploy.commands.conversation import Conversation
from kvrelay.deploy.errors import DeployError
from kvrelay.deploy.load_generator.openai_client import ResponseError, served_model
from kvrelay.deploy.options.listen_address import DEFAULT_HTTP
from kvrelay.deploy.reach.grpc_target import CommandAccess, with_access
from kvrelay.deploy.reach.http_target import HTTP_TARGET, HttpTarget

_START_SECONDS: Final = 10.0
_SESSION_SECONDS: Final = 2.0


@click.command()
@click.option(
    "--url",
    "target",
    type=HTTP_TARGET,
    default=f"http://{DEFAULT_HTTP}",
    show_default=True,
    help="Where the cluster, or any OpenAI server, serves HTTP.",
)
@click.option("--model", help="The model's name; without it the server's first one.")
@click.option("--system", help="A first message that says how to answer.")
@click.option("--temperature", type=float, help="Sampling temperature; 0 takes the likeliest.")
@click.option("--top-p", type=float, help="Sample from the likeliest tokens of this share.")
@click.option("--seed", type=int, help="The same seed gives the same answers.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The most tokens of an answer.")
@with_clear_errors
@with_access
def chat(
    *,
    debug: bool,
    target: HttpTarget,
    access: CommandAccess,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    **sampling: Any,
) -> None:
    """Talk to the served model; the conversation so far goes with each message.

    kvrelay keeps what it has computed for the conversation, in a session, until this command ends.

    Ctrl-C stops an answer; Ctrl-C or Ctrl-D at the prompt ends. Messages may be piped in, one a
    line.
    """
    options = {**sampling, "max_completion_tokens": max_tokens}
    conversation = Conversation(
        {name: value for name, value in options.items() if value is not None}, system
    )
    target.check(access)
    with asyncio.Runner() as runner:
        session = runner.run(_open(target, access))
        try:
            conversation.model = model or runner.run(_model(session, target))
            runner.run(_within(conversation.open_session(session, target.url)))
            _talk(runner, session, target, conversation)
        finally:
            runner.run(_within(conversation.close_session(session, target.url)))
            runner.run(session.close())


async def _within(call: Coroutine[Any, Any, None]) -> None:
    """Give up a call that takes long: the conversation goes on without it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SESSION_SECONDS):
            await call


async def _open(target: HttpTarget, access: CommandAccess) -> aiohttp.ClientSession:
    return target.session(access)


async def _model(session: aiohttp.ClientSession, target: HttpTarget) -> str:
    try:
        async with asyncio.timeout(_START_SECONDS):
            return await served_model(session, target.url)
    except (aiohttp.ClientError, ResponseError, TimeoutError, ValueError, KeyError) as error:
        raise DeployError(f"{target}: {str(error) or 'no answer'}") from error


def _talk(
    runner: asyncio.Runner,
    session: aiohttp.ClientSession,
    target: HttpTarget,
    conversation: Conversation,
) -> None:
    """Read messages and print answers until there are no more messages."""
    read = _reader()
    while (message := read()) is not None:
        if not message.strip():
            continue
        try:
            runner.run(_interruptible(conversation.ask(session, target.url, message, _write)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            click.echo(" (stopped)", err=True)
        except DeployError as error:
            if not sys.stdin.isatty():
                raise
            click.echo(f"\nkvrelay: {error}", err=True)
        else:
            click.echo()


async def _interruptible(answer: Coroutine[Any, Any, None]) -> None:
    """Cancel the answer at Ctrl-C.

    `asyncio.Runner` cancels as well, but its handler does not wake a loop that is about to wait. It
    would notice the signal with the answer's next piece, which may never come.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await answer
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _reader() -> Callable[[], str | None]:
    """Return a function that reads the next message, or None when there are no more.

    On a terminal lines can be edited.
    """
    if not sys.stdin.isatty():
        return lambda: next((line.rstrip("\n") for line in sys.stdin), None)
    with contextlib.suppress(ImportError):  # not everywhere
        import readline  # noqa: F401 (gives `input` its keys)

    def ask() -> str | None:
        try:
            return input("> ")
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return None

    return ask


def _write(text: str, *, reasoning: bool) -> None:
    sys.stdout.write(click.style(text, dim=True) if reasoning and sys.stdout.isatty() else text)
    sys.stdout.flush()
