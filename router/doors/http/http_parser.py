"""An HTTP parser that reads calls on where their clients offer to change the protocol."""

from __future__ import annotations

import contextlib
from typing import Final, Protocol

import httptools

_OFFERS: Final = (b"upgrade", b"http2-settings")
"""The headers of an offer to change the protocol; a `connection` header names them, too."""


class Callbacks(Protocol):
    """The object that is told the parts of calls, as httptools names them."""

    url: bytes
    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None:
        """Begin a call; its url and headers are empty."""

    def on_url(self, url: bytes) -> None:
        """Take a piece of the url."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""

    def on_headers_complete(self) -> None:
        """End the head."""

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""

    def on_message_complete(self) -> None:
        """End the call."""


class PlainHttpParser:
    """A parser of HTTP/1 for a listener that changes to no other protocol.

    A client that offers another goes on in HTTP/1 if its offer is not taken. Java's makes one with
    each call. httptools gives up such a call behind its head, and its body would be lost. So the
    head is parsed again without the offer, and then the rest.

    Args:
        callbacks: is told the parts of each call.
    """

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self.on_message_begin = callbacks.on_message_begin
        self.on_url = callbacks.on_url
        self.on_header = callbacks.on_header
        self.on_body = callbacks.on_body
        self._begin()

    def _begin(self) -> None:
        """Begin to parse with a parser that knows nothing of what came before."""
        self._parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3
            self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.get_method = self._parser.get_method
        self.get_http_version = self._parser.get_http_version
        self.should_keep_alive = self._parser.should_keep_alive

    def should_upgrade(self) -> bool:
        """Return False: every offer is ignored."""
        return False

    def feed_data(self, data: bytes) -> None:
        """Parse bytes; raise `httptools.HttpParserError` if they are no HTTP."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self._is_offer:
                    raise
                data = self._head() + data[offer.args[0] :]
                self._begin()
            else:
                return

    def on_headers_complete(self) -> None:
        """End a head, unless it comes again without its offer."""
        if not self._is_offer:
            self._callbacks.on_headers_complete()

    def on_message_complete(self) -> None:
        """End a call, unless it comes again without its offer."""
        if not self._is_offer:
            self._callbacks.on_message_complete()

    @property
    def _is_offer(self) -> bool:
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def _head(self) -> bytes:
        """Return the head of the call once more, without the offer."""
        version = self._parser.get_http_version().encode()
        lines = [self._parser.get_method() + b" " + self._callbacks.url + b" HTTP/" + version]
        for name, value in self._callbacks.headers:
            if name == b"connection":
                kept = [one for one in value.split(b",") if one.strip().lower() not in _OFFERS]
                value = b",".join(kept)
            if name not in _OFFERS:
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"
