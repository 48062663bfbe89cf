"""The file of --auth-token-file: the tokens, and the rights and limits of each.

A TOML file has a table for each token::

    [[token]]
    name = "alice"               # shown in messages and metrics, unique
    sha256 = "9f86d081884c7d65…" # of the token; or the token itself: token = "…"
    rights = ["generate"]        # of generate, admin and priorities; this is the default
    tenant = "acme"              # shares cached prefixes; the default is the name
    max_live_requests = 64
    max_queued_prompt_tokens = 200000
    max_grammar_bytes = 67108864

`sha256` and `token` may be lists, while a token replaces another. A file without tables has
one token a line, each of which may generate and is a tenant of its own.

No error message contains a token, or any value that could be one by mistake.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvrelay.router.callers import Caller, Right

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750's b64token
_ALPHABET: Final = "only letters, digits, -._~+/ and ="
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIELD_LIKE: Final = re.compile(r"[a-z_]{1,32}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_TOML_POSITION: Final = re.compile(r"\(at [^()]*\)$")
_FIELDS: Final = (
    "name",
    "token",
    "sha256",
    "rights",
    "tenant",
    "max_live_requests",
    "max_queued_prompt_tokens",
    "max_grammar_bytes",
)


class Tokens:
    """All valid tokens of a router, by their digests: it does not keep the tokens."""

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        self._callers = dict(callers)

    def find(self, token: str) -> Caller | None:
        """Find the caller of a token; None: the token is unknown.

        The time does not depend on how much of a token was right. Digests are compared, and all of
        them, even after an equal one.
        """
        digest, found = digest_of(token), None
        for known, caller in self._callers.items():
            if hmac.compare_digest(digest, known):
                found = caller
        return found


def digest_of(token: str) -> bytes:
    """The SHA-256 of a token."""
    return hashlib.sha256(token.encode()).digest()


def is_token(text: str) -> bool:
    """Whether the text can be sent as a token in a call's metadata."""
    return _TOKEN.fullmatch(text) is not None


def read_tokens(path: Path) -> Tokens:
    """Read the tokens of a file.

    Raises:
        ValueError: the file cannot be used; the message names the file and the line, or the
            entry and its field.
    """
    content = _content(path)
    lines = _lines(content)
    if not any(line.startswith("[") for line in lines):
        return Tokens({digest_of(token): _plain(token) for token in _token_lines(path, lines)})
    try:
        table = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        # Not the whole message, which may quote the file.
        at = _TOML_POSITION.search(str(error))
        raise ValueError(f"{path}: is not TOML {at.group() if at else ''}".rstrip()) from None
    return Tokens(_Entries(path).read(table))


def read_plain_tokens(path: Path) -> tuple[str, ...]:
    """Read the tokens of a file that has one a line, such as a client's.

    Raises:
        ValueError: the file cannot be read, a line is not a token, or there is none.
    """
    return _token_lines(path, _lines(_content(path)))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error


def _lines(content: bytes) -> list[str]:
    # Latin-1 decodes any bytes. No token has a character that is not ASCII.
    return [line.strip() for line in content.decode("latin-1").splitlines()]


def _token_lines(path: Path, lines: list[str]) -> tuple[str, ...]:
    """The lines that are neither empty nor comments, each checked to be a token."""
    tokens = []
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#"):
            continue
        if not is_token(line):
            raise ValueError(f"{path}: line {number} is not a token: {_ALPHABET}")
        tokens.append(line)
    if not tokens:
        raise ValueError(f"{path}: contains no token")
    return tuple(tokens)


def _plain(token: str) -> Caller:
    """Make the caller of a token in a file with one a line.

    The name is made from the digest, so it is the same for any position of the line, and on every
    router. No entry of a TOML file can have such a name.
    """
    name = f"sha256:{digest_of(token).hex()[:16]}"
    return Caller(name, tenant=name, rights=frozenset({Right.GENERATE}))


class _Entries:
    """A reader of the tables of one TOML file, which checks each value."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entry = ""  # which is being read, as messages name it

    def read(self, table: Mapping[str, Any]) -> dict[bytes, Caller]:
        """Map every token's digest to its caller."""
        entries = table.get("token")
        if table.keys() != {"token"} or not isinstance(entries, list):
            raise ValueError(f"{self._path}: must have [[token]] tables and nothing else")
        callers: dict[bytes, Caller] = {}
        names: set[str] = set()
        for number, fields in enumerate(entries, start=1):
            self._entry = f"token {number}"
            if not isinstance(fields, dict):
                raise self._error("name", "must be in a [[token]] table")
            caller = self._caller(fields)
            if caller.name in names:
                raise self._error("name", "another entry has the same")
            names.add(caller.name)
            for digest in self._digests(fields):
                if digest in callers:
                    raise self._error(_secret_field(fields), "is given twice in the file")
                callers[digest] = caller
        return callers

    def _caller(self, fields: Mapping[str, Any]) -> Caller:
        name = self._word(fields, "name")
        self._entry += f" ({name})"
        for field in fields.keys() - set(_FIELDS):
            shown = field if _FIELD_LIKE.fullmatch(field) else "a field"
            raise self._error(shown, f"is unknown; the fields are {', '.join(_FIELDS)}")
        return Caller(
            name=name,
            tenant=self._word(fields, "tenant", default=name),
            rights=self._rights(fields),
            max_live_requests=self._limit(fields, "max_live_requests"),
            max_queued_prompt_tokens=self._limit(fields, "max_queued_prompt_tokens"),
            max_grammar_bytes=self._limit(fields, "max_grammar_bytes"),
        )

    def _word(self, fields: Mapping[str, Any], field: str, default: str | None = None) -> str:
        value = fields.get(field, default)
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise self._error(field, "must be 1 to 64 letters, digits, ., _ and -")
        return value

    def _rights(self, fields: Mapping[str, Any]) -> frozenset[Right]:
        given = fields.get("rights", [Right.GENERATE])
        known = {right.value: right for right in Right}
        if not isinstance(given, list) or not all(
            isinstance(one, str) and one in known for one in given
        ):
            raise self._error("rights", f"must be a list of {', '.join(known)}")
        return frozenset(known[one] for one in given)

    def _limit(self, fields: Mapping[str, Any], field: str) -> int | None:
        value = fields.get(field)
        if value is None:
            return None
        if type(value) is not int or value < 1:  # a boolean is an int to Python
            raise self._error(field, "must be an integer, at least 1")
        return value

    def _digests(self, fields: Mapping[str, Any]) -> list[bytes]:
        if ("token" in fields) == ("sha256" in fields):
            raise self._error("token", "give either token or sha256")
        field = _secret_field(fields)
        given = fields[field] if isinstance(fields[field], list) else [fields[field]]
        if not given or not all(isinstance(one, str) for one in given):
            raise self._error(field, "must be a string, or a list of strings")
        if field == "token":
            if not all(map(is_token, given)):
                raise self._error(field, f"is not a token: {_ALPHABET}")
            return [digest_of(one) for one in given]
        if not all(_SHA256.fullmatch(one.lower()) for one in given):
            raise self._error(field, "must have 64 hexadecimal digits")
        return [bytes.fromhex(one) for one in given]

    def _error(self, field: str, problem: str) -> ValueError:
        return ValueError(f"{self._path}: {self._entry}: {field}: {problem}")


def _secret_field(fields: Mapping[str, Any]) -> str:
    return "token" if "token" in fields else "sha256"
