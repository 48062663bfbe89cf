"""The commands' way to an OpenAI server over HTTP."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from kvrelay.deploy.errors import DeployError, OptionError
from kvrelay.deploy.options.listen_address import Address
from kvrelay.deploy.options.option_types import ParsedParam
from kvrelay.deploy.reach.grpc_target import CommandAccess
from kvrelay.net.addresses import is_loopback

IDLE_CONNECTION_SECONDS = 2.0
"""The idle time after which a connection is not used again.

uvicorn closes idle connections after five seconds, and a request sent at that moment fails.
"""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """A server of OpenAI's API."""

    url: str
    """The base URL, without `/v1` and without a slash at the end."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``http://127.0.0.1:8000`` or ``https://host/v1``. Raises ValueError."""
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{text!r} is no URL like http://127.0.0.1:8000")
        if parts.query or parts.fragment or parts.username or parts.password:
            raise ValueError(f"{text!r}: give host, port and path alone")
        return cls(text.rstrip("/").removesuffix("/v1").rstrip("/"))

    def __str__(self) -> str:
        return self.url

    def session(self, access: CommandAccess) -> aiohttp.ClientSession:
        """Make a session that may be used for long answers; an event loop must run.

        Raises:
            DeployError: the token would go to another machine in plain text.
            OptionError: the file of --ca cannot be used, or TLS is meant and the URL has none.
        """
        headers = dict(access.metadata)
        connector = aiohttp.TCPConnector(
            limit=0, ssl=self._tls(access), keepalive_timeout=IDLE_CONNECTION_SECONDS
        )
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)

    def check(self, access: CommandAccess) -> None:
        """Raise the errors that `session` would raise."""
        self._tls(access)

    def _tls(self, access: CommandAccess) -> ssl.SSLContext | bool:
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            access.credentials()  # says what is wrong with --ca
            return ssl.create_default_context(cafile=access.ca)
        if access.tls:
            raise OptionError("--tls", f"{self.url} is without TLS: write https://")
        if access.token is not None and not is_loopback(parts.hostname or ""):
            raise DeployError(
                f"{self.url}: the token would go to another machine in plain text: write https://"
            )
        return True


def _parse_target(text: str) -> Address | HttpTarget:
    return HttpTarget.parse(text) if "://" in text else Address.parse(text)


HTTP_TARGET = ParsedParam("url", HttpTarget.parse, HttpTarget)
"""A URL of an OpenAI server."""
TARGET = ParsedParam("host:port|url", _parse_target, Address, HttpTarget)
"""``host:port`` for gRPC, or a URL for HTTP."""
