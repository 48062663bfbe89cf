"""Which web pages may call the door: none, but those of origins that the operator names.

A browser sends a page's calls without asking anybody, and only keeps the answers from the page. So
a call that says that it comes from another page is refused: else any page that somebody looks at
could have this machine compute.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.router.http.errors import HttpError, answer_to


def with_origins(app: ASGIApp, named: str) -> ASGIApp:
    """The application, open to pages of these origins and of its own.

    Args:
        app: the door's.
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
        expose_headers=["x-request-id", "retry-after", "retry-after-ms", "x-should-retry"],
    )


class _OwnPages:
    """Refuses calls of pages that are neither the application's own nor of a named origin."""

    def __init__(self, app: ASGIApp, origins: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or origin in self._origins or _is_own(origin, headers.get("host", "")):
            await self._app(scope, receive, send)
            return
        refusal = "a page of another origin may not call this server (--http-origins)"
        told = answer_to(HttpError(403, "permission_error", refusal))
        length = (b"content-length", b"%d" % len(told.body))
        sent = [(b"content-type", b"application/json"), length, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": told.status, "headers": sent})
        await send({"type": "http.response.body", "body": told.body})


def _is_own(origin: str, host: str) -> bool:
    return origin in (f"http://{host}", f"https://{host}")
