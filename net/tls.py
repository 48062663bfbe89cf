"""A process's TLS files: checked early, made into gRPC credentials, and read again if they change.

A gRPC listener asks for its certificate at every new connection; a channel keeps one as long as it
is open. So new files hold for new connections to a listener, and for channels that are opened
later. Open connections keep the certificates that they began with.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from kvrelay.net.watched_files import WatchedFiles

_FLIGHTS: Final = 8
"""The most flights (turns of either side) of a TLS handshake; no handshake needs as many."""
_LOOK_SECONDS: Final = 1.0
"""The least time between two looks at the files, however many connections come."""
_log = logging.getLogger(__name__)


class TlsFileError(ValueError):
    """A TLS file that cannot be used.

    Args:
        field: the field of `TlsFiles` with the file's path.
        problem: what is wrong; it contains the path.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of a process's certificate, key and authority, all PEM.

    Paths, not contents, because configurations are logged and pickled.
    """

    cert: Path
    """The certificate, and the chain from it to its authority."""
    key: Path
    """The certificate's private key, not encrypted."""
    ca: Path | None = None
    """The authority of the other side's certificate; None: the other side needs none."""
    name: str | None = None
    """The name that a listener's certificate must have; None: the host that is connected to."""

    def check(self, host: str | None = None) -> None:
        """Check the files, so that a process does not start with handshakes that always fail.

        The files must be readable, and the key must belong to the certificate. With a `ca`, a
        handshake in memory checks that the certificate is signed by it, valid today and for both
        sides, and names `host`.

        Raises:
            TlsFileError: names the first file that cannot be used.
        """
        check_certificates("cert", self.cert)
        _check_readable("key", self.key)
        _context(self, ssl.PROTOCOL_TLS_SERVER)
        if self.ca is not None:
            check_certificates("ca", self.ca)
            _shake_hands(self, self.ca, host)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of all files."""
        return (self.cert, self.key) if self.ca is None else (self.cert, self.key, self.ca)

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """A listener's own certificate, and the authority it trusts. Reads files."""
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        ca = None if self.ca is None else self.ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], ca)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a channel to a listener with the same `ca`. Reads files."""
        assert self.ca is not None, "without a ca there is no authority to trust"
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()
        )


class CurrentTls:
    """gRPC credentials from the present contents of TLS files; callable from any thread.

    New files that cannot be used change nothing: the credentials stay, and an error is logged.

    Raises:
        OSError: a file cannot be read at the start.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watched = WatchedFiles(files.paths)  # before the first read: no change is missed
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._read()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a channel that is opened now, to a listener with the same `ca`."""
        self._look()
        assert self._channel is not None, "without a ca there is no authority to trust"
        return self._channel

    @property
    def channel_options(self) -> list[tuple[str, str]]:
        """Options for the same channel: the name of the listener's certificate, if not its host."""
        name = self._files.name
        return [] if name is None else [("grpc.ssl_target_name_override", name)]

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a listener, which looks at the files when a peer connects.

        With a `ca`, it refuses peers without a certificate that this authority signed.
        """
        needs_client = self._files.ca is not None
        return grpc.dynamic_ssl_server_credentials(self._server, self._fetcher(), needs_client)

    def _fetcher(self) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
        """Make a function that returns a listener's new configuration; None: it has not changed."""
        shown = self._server

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            self._look()
            if shown is self._server:
                return None
            shown = self._server
            return shown

        return fetch

    def _look(self) -> None:
        """Read the files again if they have changed."""
        with self._lock:
            if time.monotonic() - self._looked < _LOOK_SECONDS:
                return
            self._looked = time.monotonic()
            if not self._watched.changed():
                return
            try:
                self._files.check()
                self._read()
            except (OSError, TlsFileError) as error:
                _log.error("TLS: the certificates stay as they were: %s", error)
            else:
                _log.info("TLS: read the certificates again: %s", self._files.cert)

    def _read(self) -> None:
        self._server = self._files.server_configuration()
        self._channel = None if self._files.ca is None else self._files.channel_credentials()


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """A context for an asyncio listener, which looks at the files when a client connects.

    New files that cannot be used change nothing, and an error is logged.

    Raises:
        OSError: a file cannot be read.
        TlsFileError: a file is no certificate or key.
    """
    watched = WatchedFiles(files.paths)  # before the first read: no change is missed
    shown = listening = _context(files, ssl.PROTOCOL_TLS_SERVER)
    looked = time.monotonic()

    def show(client: ssl.SSLObject, _name: str | None, _listening: ssl.SSLContext) -> None:
        nonlocal shown, looked
        if time.monotonic() - looked >= _LOOK_SECONDS:
            looked = time.monotonic()
            if watched.changed():
                shown = _read_again(files) or shown
        client.context = shown

    listening.sni_callback = show
    return listening


def _read_again(files: TlsFiles) -> ssl.SSLContext | None:
    """Make a listener's context from the present files; None: they cannot be used."""
    try:
        files.check()
        context = _context(files, ssl.PROTOCOL_TLS_SERVER)
    except (OSError, TlsFileError) as error:
        _log.error("TLS: the certificates stay as they were: %s", error)
        return None
    _log.info("TLS: read the certificates again: %s", files.cert)
    return context


def _check_readable(field: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise TlsFileError(field, f"{path}: {error.strerror}") from error


def check_certificates(field: str, path: Path) -> None:
    """Raise TlsFileError unless the file contains a certificate."""
    _check_readable(field, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise TlsFileError(field, f"{path}: contains no PEM certificate") from error


def _context(files: TlsFiles, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    try:
        # Without one, OpenSSL would ask for an encrypted key's password on the terminal.
        context.load_cert_chain(files.cert, files.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsFileError("key", f"{files.key}: is not the key of {files.cert}") from error
        problem = f"{files.key}: contains no PEM private key, or an encrypted one"
        raise TlsFileError("key", problem) from error
    return context


def _shake_hands(files: TlsFiles, ca: Path, host: str | None) -> None:
    """Run both sides of a handshake in memory; raise TlsFileError if it fails."""
    client = _context(files, ssl.PROTOCOL_TLS_CLIENT)
    server = _context(files, ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname = host is not None
    for context in (client, server):
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(ca)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_FLIGHTS):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                why = error.verify_message.rstrip(".")
                raise TlsFileError("cert", f"{files.cert}: {why}, checked with {ca}") from error
            except ssl.SSLError as error:
                raise TlsFileError("cert", f"{files.cert}: {error.reason}") from error
