"""Authorities and certificates, made when a test needs them."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvrelay.net.channels import worker_channel
from kvrelay.net.tls import CurrentTls, TlsFiles

LOOPBACK = "127.0.0.1"
_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates, and leaves them in `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        authority = (
            _unsigned(self._name, self._name, self._key, _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(authority.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str = "node",
        host: str = LOOPBACK,
        valid_for: datetime.timedelta = _DAY,
        password: bytes | None = None,
    ) -> TlsFiles:
        """A certificate for `host`, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _unsigned(_named(name), self._name, key, valid_for)
            .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = TlsFiles(self._folder / f"{name}.crt", self._folder / f"{name}.key", self.ca)
        files.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(_as_pem(key, password))
        return files


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | CurrentTls | None
) -> grpc.aio.Channel:
    """A channel of its own, with credentials of any kind, or in plain text."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    if isinstance(credentials, CurrentTls):
        return worker_channel(address, credentials)
    return grpc.aio.secure_channel(address, credentials, options)


def _unsigned(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    valid_for: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * _DAY)
        .not_valid_after(now + valid_for)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _as_pem(key: ec.EllipticCurvePrivateKey, password: bytes | None) -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        encryption = serialization.BestAvailableEncryption(password)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )
