"""Addresses to listen on and to connect to: ``host:port``."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass
from typing import Final

from kvrelay.deploy.errors import DeployError
from kvrelay.net.addresses import host_port, is_loopback

MAX_PORT: Final = 65535
RELEASE_SECONDS: Final = 2.0
"""Seconds in which the processes of a cluster that was killed end and free their ports."""
_LOOK_AGAIN_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port; port 0 asks for any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``127.0.0.1:50051``, ``localhost:0`` or ``[::1]:50051``.

        Raises ValueError, with a message that says what is wrong.
        """
        host, colon, port = text.strip().rpartition(":")
        if not colon or not host:
            raise ValueError(f"{text!r} is not host:port")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"{text!r}: write an IPv6 host in brackets, like [::1]:50051")
        if not port.isascii() or not port.isdecimal() or int(port) > MAX_PORT:
            raise ValueError(f"{text!r}: the port must be a number from 0 to {MAX_PORT}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return host_port(self.host, self.port)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    def check_free(self, option: str) -> None:
        """Raise DeployError, naming `option`, if nothing can listen here.

        A port that is in use may become free for `RELEASE_SECONDS`: a cluster that was here may
        still be ending. So a port in use is found before a model is loaded; the listener itself
        raises if somebody takes the port later.
        """
        give_up_at = time.monotonic() + RELEASE_SECONDS
        while error := self.in_the_way():
            if error.errno != errno.EADDRINUSE or time.monotonic() > give_up_at:
                reason = error.strerror or str(error)
                raise DeployError(f"{option}: cannot listen on {self}: {reason}") from error
            time.sleep(_LOOK_AGAIN_SECONDS)

    def in_the_way(self) -> OSError | None:
        """Return the error that keeps anything from listening here now; None if there is none."""
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                # As servers do: connections that linger in TIME_WAIT are no obstacle.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
                probe.listen(1)
        except OSError as error:
            return error
        return None


DEFAULT_GRPC: Final = Address("127.0.0.1", 50051)
"""The address at which `kvrelay serve` listens, and which the other commands use."""
DEFAULT_HTTP: Final = Address("127.0.0.1", 8000)
"""The address at which `kvrelay serve` serves OpenAI's API, if no other program listens there."""
DEFAULT_ADMIN: Final = Address("127.0.0.1", 50052)
"""The address at which `kvrelay serve` listens to operators, and which `kvrelay drain` uses."""
DEFAULT_METRICS: Final = Address("127.0.0.1", 9400)
