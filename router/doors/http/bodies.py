"""Bodies of calls: their bounds, their encodings, and the rest of those that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from typing import Final

from starlette.types import Receive, Scope

from kvrelay.net.allocator import Trimmer
from kvrelay.net.door_rules import HTTP
from kvrelay.net.receiving import Receipts
from kvrelay.router.doors.http.errors import HttpError

CLOSE: Final = (b"connection", b"close")
"""The header of an answer after which the connection closes."""
_MOST_REST_BYTES: Final = 64 << 10
_MOST_REST_SECONDS: Final = 1.0
_PLAIN: Final = ("", "identity")
_ANY_HEADER: Final = 32 + zlib.MAX_WBITS
"""The value with which zlib takes gzip's header and its own."""
_SERVED: Final = ("gzip", "x-gzip", "deflate")


class Bodies:
    """The bounds of bodies that arrive at the same time.

    Args:
        most_bytes: the most bytes of one body.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.receipts = Receipts(HTTP.most_receiving)
        self.trimmer = Trimmer()


async def decode_body(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """Return a body without the encoding that its `content-encoding` names.

    Raises:
        HttpError: the encoding is not served, the body has not this encoding, or is too large.
    """
    name = encoding.strip().lower()
    if name in _PLAIN:
        return body
    if name not in _SERVED:
        served = " or ".join(_SERVED)
        what = f"content-encoding: must be {served}, got {encoding[:64]!r}"
        raise HttpError(415, "invalid_request_error", what)
    return await asyncio.to_thread(_inflate, body, name, most_bytes)


def _inflate(body: bytes, name: str, most_bytes: int) -> bytes:
    inflating = zlib.decompressobj(_ANY_HEADER)
    try:
        plain = inflating.decompress(body, most_bytes + 1)
    except zlib.error as error:
        what = f"content-encoding: the body is not {name}: {error}"
        raise HttpError(400, "invalid_request_error", what) from None
    if len(plain) > most_bytes:
        raise too_large(most_bytes)
    if not inflating.eof or inflating.unused_data:
        what = f"content-encoding: the body is not one {name} stream"
        raise HttpError(400, "invalid_request_error", what)
    return plain


def too_large(most_bytes: int) -> HttpError:
    """Return the refusal of a body that is too large."""
    return HttpError(
        413,
        "invalid_request_error",
        f"the body has more than {most_bytes} bytes (--max-message-bytes)",
    )


async def take_rest(scope: Scope, receive: Receive) -> bool:
    """Receive the rest of a short body; return whether its end has come.

    A connection that is closed while its client still sends is reset: the client may lose the
    answer. So what soon comes is received before the answer, and if more than that would follow,
    the answer must say that the connection closes.
    """
    if any(name == b"expect" for name, _ in scope["headers"]):
        return False  # it sends its body only if it is asked to
    received = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_MOST_REST_SECONDS):
            while received <= _MOST_REST_BYTES:
                message = await receive()
                if message["type"] != "http.request":
                    return False
                if not message.get("more_body"):
                    return True
                received += len(message["body"])
    return False
