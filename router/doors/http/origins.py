"""The web pages that may call the door: none, except those of origins that the operator names.

A browser sends a page's calls to any server, and only withholds the answers from the page. So a
call whose headers name another page's origin is refused. Otherwise any page that a user visits
could make this machine compute.
"""

from __future__ import annotations

import contextlib
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.router.doors.http.bodies import CLOSE, take_rest
from kvrelay.router.doors.http.errors import HttpError, answer_to, error_form


def with_hosts(app: ASGIApp, named: str) -> ASGIApp:
    """Close the application to pages whose host name was made to point at this machine.

    To the browser, such a page's calls go to the page's own origin (DNS rebinding). But their Host
    header has a name, while honest calls have this machine's address or localhost.

    Args:
        app: the door's application.
        named: origins as in `with_origins`, whose hosts also count as this machine's.
    """
    origins = [one.strip() for one in named.split(",")]
    if "*" in origins:
        return app
    return _OwnHosts(app, frozenset({_name_of(urlsplit(one).netloc) for one in origins}))


def with_origins(app: ASGIApp, named: str) -> ASGIApp:
    """Open the application to pages of these origins and of its own.

    Args:
        app: the door's application.
        named: origins such as ``https://chat.example``, separated by commas; ``*``: all.
    """
    origins = [one.strip() for one in named.split(",") if one.strip()]
    if not origins:
        return _OwnPages(app)
    return CORSMiddleware(
        app if "*" in origins else _OwnPages(app, frozenset(origins)),
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[
            *("x-request-id", "request-id"),
            *("retry-after", "retry-after-ms", "x-should-retry"),
        ],
    )


class _OwnHosts:
    """An application that refuses calls to hosts other than addresses, localhost and named ones."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _name_of(Headers(scope=scope).get("host", ""))
        if name in self._names or name in ("", "localhost") or _is_address(name):
            await self._app(scope, receive, send)
        else:
            why = "this server has another host name (--http-origins)"
            await _refuse(scope, receive, send, why)


class _OwnPages:
    """An application that refuses calls of pages other than its own and those of named origins."""

    def __init__(self, app: ASGIApp, origins: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or origin in self._origins or _is_own(origin, headers.get("host", "")):
            await self._app(scope, receive, send)
            return
        why = "a page of another origin may not call this server (--http-origins)"
        await _refuse(scope, receive, send, why)


async def _refuse(scope: Scope, receive: Receive, send: Send, why: str) -> None:
    await take_rest(scope, receive)
    told = answer_to(HttpError(403, "permission_error", why))
    body = error_form(scope["path"])(told, "")
    length = (b"content-length", b"%d" % len(body))
    sent = [(b"content-type", b"application/json"), length, CLOSE]
    await send({"type": "http.response.start", "status": told.status, "headers": sent})
    await send({"type": "http.response.body", "body": body})


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        ip_address(name)
        return True
    return False


def _name_of(host: str) -> str:
    """Return a host without its port; text that is no host stays as it is."""
    with contextlib.suppress(ValueError):
        return urlsplit(f"//{host}").hostname or host
    return host


def _is_own(origin: str, host: str) -> bool:
    return origin in (f"http://{host}", f"https://{host}")
