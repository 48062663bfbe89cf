"""Unusable TLS files are found before anything starts."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrelay.net.tls import TlsFileError, TlsFiles
from tests.certificates import LOOPBACK, Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.issue()


def test_what_fits_passes(files: TlsFiles):
    files.check(LOOPBACK)
    files.check()
    replace(files, ca=None).check()


@pytest.mark.parametrize("field", ["cert", "key", "ca"])
def test_a_missing_file_is_named(files: TlsFiles, tmp_path: Path, field: str):
    missing: Any = tmp_path / "none.pem"
    with pytest.raises(TlsFileError) as caught:
        replace(files, **{field: missing}).check(LOOPBACK)
    assert caught.value.field == field
    assert caught.value.problem == f"{missing}: No such file or directory"


def test_a_folder_is_no_file(files: TlsFiles, tmp_path: Path):
    with pytest.raises(TlsFileError, match=r"^key: .*Is a directory"):
        replace(files, key=tmp_path).check(LOOPBACK)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ("cert", "contains no PEM certificate"),
        ("key", "contains no PEM private key"),
        ("ca", "contains no PEM certificate"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"nothing", b"\xff\x00"])
def test_a_file_of_something_else_is_named(
    files: TlsFiles, tmp_path: Path, field: str, problem: str, content: bytes
):
    other: Any = tmp_path / "other.pem"
    other.write_bytes(content)
    with pytest.raises(TlsFileError, match=f"^{field}: {other}: {problem}"):
        replace(files, **{field: other}).check(LOOPBACK)


def test_an_encrypted_key_is_refused_and_no_password_asked_for(authority: Authority):
    with pytest.raises(TlsFileError, match=r"^key: .*, or an encrypted one"):
        authority.issue("encrypted", password=b"secret").check(LOOPBACK)


def test_another_certificates_key_is_refused(authority: Authority, files: TlsFiles):
    other = authority.issue("other")
    with pytest.raises(TlsFileError, match=f"^key: {other.key}: is not the key of {files.cert}"):
        replace(files, key=other.key).check(LOOPBACK)


def test_another_authoritys_certificate_is_refused(files: TlsFiles, tmp_path: Path):
    ca = Authority(tmp_path, "stranger").ca
    with pytest.raises(TlsFileError, match=f"^cert: {files.cert}: .*, checked with {ca}"):
        replace(files, ca=ca).check(LOOPBACK)


def test_a_certificate_of_yesterday_is_refused(authority: Authority):
    expired = authority.issue("expired", valid_for=-datetime.timedelta(days=1))
    with pytest.raises(TlsFileError, match=r"^cert: .*: certificate has expired"):
        expired.check(LOOPBACK)


def test_a_certificate_of_another_host_is_refused(authority: Authority):
    elsewhere = authority.issue("elsewhere", host="worker.example")
    elsewhere.check()
    elsewhere.check("worker.example")
    with pytest.raises(TlsFileError, match=r"^cert: .*127\.0\.0\.1"):
        elsewhere.check(LOOPBACK)
