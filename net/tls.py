"""A process's TLS files: checked early, and made into gRPC credentials."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

_FLIGHTS: Final = 8
"""Turns of either side in a TLS handshake; more than any handshake needs."""


class TlsFileError(ValueError):
    """A TLS file cannot be used.

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
    """The paths of a process's certificate, key and authority, all PEM; read once, at its start.

    Paths, not contents, because configurations are logged and pickled.
    """

    cert: Path
    """The certificate, and the chain from it to its authority."""
    key: Path
    """The certificate's private key, not encrypted."""
    ca: Path | None = None
    """The authority of the other side's certificate; None: the other side needs none."""

    def check(self, host: str | None = None) -> None:
        """Checks the files, so that a process does not start with handshakes that always fail.

        The files must be readable, and the key the certificate's. With a `ca`, a
        handshake in memory checks that the certificate is signed by it, valid today and
        for both sides, and names `host`.

        Raises:
            TlsFileError: names the first file that cannot be used.
        """
        check_certificates("cert", self.cert)
        _check_readable("key", self.key)
        _context(self, ssl.PROTOCOL_TLS_SERVER)
        if self.ca is not None:
            check_certificates("ca", self.ca)
            _shake_hands(self, self.ca, host)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a listener; with a `ca`, it refuses peers without one of it. Reads files."""
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        ca = None if self.ca is None else self.ca.read_bytes()
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel to a listener with the same `ca`. Reads files."""
        assert self.ca is not None, "without a ca there is no authority to trust"
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()
        )


def _check_readable(field: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise TlsFileError(field, f"{path}: {error.strerror}") from error


def check_certificates(field: str, path: Path) -> None:
    """Raises TlsFileError unless the file contains a certificate."""
    _check_readable(field, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise TlsFileError(field, f"{path}: contains no PEM certificate") from error


def _context(files: TlsFiles, side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    try:
        # Without a password, an encrypted key would be asked for on the terminal.
        context.load_cert_chain(files.cert, files.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsFileError("key", f"{files.key}: is not the key of {files.cert}") from error
        problem = f"{files.key}: contains no PEM private key, or an encrypted one"
        raise TlsFileError("key", problem) from error
    return context


def _shake_hands(files: TlsFiles, ca: Path, host: str | None) -> None:
    """Runs both sides of a handshake in memory; raises TlsFileError if it fails."""
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
