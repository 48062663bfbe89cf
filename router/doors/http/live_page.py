"""The live page: one file of HTML, and the stream of events that it shows."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Final

from google.protobuf.json_format import MessageToDict

from kvrelay.router.callers import Caller
from kvrelay.router.doors.http.exchange import ClientGone, Exchange
from kvrelay.router.doors.progress_view import ProgressView
from kvrelay.router.doors.server_info import ServerInfo
from kvrelay.v1 import inference_pb2 as pb

_SECONDS: Final = 0.25
"""The time between two looks at the requests; changes are sent."""
_LOOKS: Final = 4
"""The looks at the requests from one event about the cluster to the next."""
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class LivePage:
    """The live page and its stream.

    Args:
        model: the served model's name.
        info: the source of the events about the cluster.
        progress: tells how far requests have come.
        ends: tells whether the router is stopping.
        read_timeout: the seconds in which a viewer must take an event; then its connection is
            dropped.
    """

    def __init__(
        self,
        model: str,
        info: ServerInfo,
        progress: ProgressView,
        ends: Callable[[], bool],
        read_timeout: float,
    ) -> None:
        self._progress = progress
        self._read_timeout = read_timeout
        self._model = model
        self._info = info
        self._ends = ends
        page = files("kvrelay.router.doors.http").joinpath("live_page.html").read_text("utf-8")
        self._page = page.encode()
        self._headers = [
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", _policy(page).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        ]

    async def page(self, exchange: Exchange) -> None:
        """Send the page, which contains nothing about the cluster."""
        await exchange.answer(self._page, headers=self._headers)

    async def stream(self, exchange: Exchange, caller: Caller) -> None:
        """Send the state of the cluster each second, and that of its requests more often.

        It ends when the client has left.
        """
        with self._progress.watching():
            await exchange.unless_gone(self._send(exchange, caller))

    async def _send(self, exchange: Exchange, caller: Caller) -> None:
        last = None
        for number in itertools.count():
            if self._ends():
                break
            if number % _LOOKS == 0:
                message = self._info.message(caller)
                # A thousand workers take a while, in which others' tokens would wait.
                await self._write(exchange, await asyncio.to_thread(self._event, message))
            rows = self._progress.shown()
            if rows != last:
                last = rows
                event = b"event: progress\ndata: " + json.dumps(rows).encode() + b"\n\n"
                await self._write(exchange, event)
            await asyncio.sleep(_SECONDS)
        await exchange.end()

    async def _write(self, exchange: Exchange, event: bytes) -> None:
        """Send an event; drop a viewer that takes nothing, as it keeps others from watching."""
        try:
            async with asyncio.timeout(self._read_timeout):
                await exchange.write(event)
        except TimeoutError:
            exchange.abort()
            raise ClientGone from None

    def _event(self, message: pb.GetServerInfoResponse) -> bytes:
        shown = MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return b"data: " + json.dumps({"model": self._model, **shown}).encode() + b"\n\n"


def _policy(page: str) -> str:
    """Return a policy that allows the page only its own script, style and server."""
    hashes = {kind: _hash(text) for kind, text in _INLINE.findall(page)}
    return (
        f"default-src 'none'; script-src '{hashes['script']}'; style-src '{hashes['style']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
