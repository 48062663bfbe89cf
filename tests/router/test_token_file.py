"""What a router reads in its file of tokens, and how it says what is wrong there."""

from __future__ import annotations

import contextlib
import hashlib
import re
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.access.token_file import read_plain_tokens, read_tokens
from kvrelay.router.callers import Caller, Right

SECRET = "s3cret-token"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def test_an_entry_has_a_name_rights_and_limits(path: Path):
    path.write_text(
        f"""
        # The caf\u00e9's.
        [[token]]
        name = "alice"
        token = "alpha-1"

        [[token]]
        name = "bob.batch"
        sha256 = "{sha256("beta-2").upper()}"
        rights = ["generate", "priorities"]
        tenant = "acme"
        max_live_requests = 4
        max_queued_prompt_tokens = 1_000
        max_grammar_bytes = 65_536

        [[token]]
        name = "root"
        token = ["old", "new"]
        rights = ["admin"]
        tenant = "acme"
    """,
        encoding="utf-8",
    )
    tokens = read_tokens(path)
    assert tokens.find("alpha-1") == Caller("alice", "alice", frozenset({Right.GENERATE}))
    assert tokens.find("beta-2") == Caller(
        "bob.batch", "acme", frozenset({Right.GENERATE, Right.PRIORITIES}), 4, 1000, 65_536
    )
    root = Caller("root", "acme", frozenset({Right.ADMIN}))
    assert tokens.find("old") == tokens.find("new") == root
    for other in ("alpha-2", "", "alice", sha256("beta-2"), "caf\u00e9"):
        assert tokens.find(other) is None


def test_the_example_in_the_docs_is_a_file_of_tokens(path: Path):
    page = Path(__file__).parents[2] / "docs" / "security.md"
    found = re.search(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    path.write_text(found[1])
    assert read_tokens(path).find("another-token") == Caller(
        "batch", "acme", frozenset({Right.GENERATE}), 64, 200_000, 64 << 20
    )


def test_a_line_is_a_token_that_may_generate(path: Path):
    path.write_text("# alice\nalpha-1\n\n  beta_2==  \n")
    assert read_plain_tokens(path) == ("alpha-1", "beta_2==")
    tokens = read_tokens(path)
    alpha, beta = tokens.find("alpha-1"), tokens.find("beta_2==")
    assert alpha is not None
    assert beta is not None
    assert alpha.rights == beta.rights == {Right.GENERATE}
    assert (alpha.tenant, beta.tenant) == (alpha.name, beta.name)
    assert alpha.name == f"sha256:{sha256('alpha-1')[:16]}"
    assert alpha.name != beta.name
    path.write_text("beta_2==\nalpha-1\n")
    assert read_tokens(path).find("alpha-1") == alpha


ENTRY = f'[[token]]\nname = "alice"\ntoken = "{SECRET}"\n'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (f"[[token]]\nname = {SECRET}", "is not TOML (at line 2, column 8)"),
        (f"[[token]]\nname = 'alice\n{SECRET}", "is not TOML (at end of document)"),
        ("[[tokens]]\nname = 'alice'", "must have [[token]] tables and nothing else"),
        ("[token]\nname = 'alice'", "must have [[token]] tables and nothing else"),
        (f"{SECRET} = 1\n{ENTRY}", "must have [[token]] tables and nothing else"),
        (f"[[token]]\ntoken = '{SECRET}'", "token 1: name: must be 1 to 64 letters"),
        (f"[[token]]\nname = '{SECRET}/'", "token 1: name: must be 1 to 64 letters"),
        (f"{ENTRY}tenant = '{SECRET} '", "token 1 (alice): tenant: must be 1 to 64 letters"),
        (f"{ENTRY}right = ['admin']", "token 1 (alice): right: is unknown; the fields are name"),
        (f"{ENTRY}{SECRET} = true", "token 1 (alice): a field: is unknown; the fields are name"),
        (f"{ENTRY}rights = 'admin'", "token 1 (alice): rights: must be a list of generate, admin"),
        (f"{ENTRY}rights = ['{SECRET}']", "token 1 (alice): rights: must be a list of generate"),
        (f"{ENTRY}rights = [[]]", "token 1 (alice): rights: must be a list of generate"),
        (f"{ENTRY}max_live_requests = 0", "token 1 (alice): max_live_requests: must be an integer"),
        (f"{ENTRY}max_live_requests = true", "token 1 (alice): max_live_requests: must be an int"),
        (f"{ENTRY}max_queued_prompt_tokens = 1.5", "token 1 (alice): max_queued_prompt_tokens: mu"),
        ("[[token]]\nname = 'alice'", "token 1 (alice): token: give either token or sha256"),
        (f"{ENTRY}sha256 = ''", "token 1 (alice): token: give either token or sha256"),
        ("[[token]]\nname = 'a'\ntoken = []", "token 1 (a): token: must be a string, or a list"),
        ("[[token]]\nname = 'a'\ntoken = 1", "token 1 (a): token: must be a string, or a list"),
        (f"[[token]]\nname = 'a'\ntoken = '{SECRET} '", "token 1 (a): token: is not a token"),
        (f"[[token]]\nname = 'a'\nsha256 = '{SECRET}'", "token 1 (a): sha256: must have 64 hex"),
        (f"{ENTRY}{ENTRY}", "token 2 (alice): name: another entry has the same"),
        (
            f"{ENTRY}[[token]]\nname = 'bob'\nsha256 = '{sha256(SECRET)}'",
            "token 2 (bob): sha256: is given twice in the file",
        ),
    ],
)
def test_what_is_wrong_is_said_without_the_token(path: Path, content: str, problem: str):
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {problem}')}") as caught:
        read_tokens(path)
    assert SECRET not in str(caught.value)


WHOLE = f"""
[[token]]
name = "alice"
token = ["{SECRET}", "new-{SECRET}"]
rights = ["generate", "admin"]
tenant = "acme"
max_live_requests = 4
[[token]]
name = "bob"
sha256 = "{sha256("beta")}"
"""


@settings(deadline=timedelta(seconds=5))
@given(
    cut=st.tuples(st.integers(0, len(WHOLE)), st.integers(0, len(WHOLE))),
    put=st.sampled_from(["", "[", "]", "{", '"', "'", "=", "\n", "\x00", "caf\u00e9", "[" * 3000]),
)
def test_a_file_cut_anywhere_is_read_or_refused_without_the_token(
    tmp_path_factory: pytest.TempPathFactory, cut: tuple[int, int], put: str
):
    path = tmp_path_factory.getbasetemp() / "cut"
    path.write_text(WHOLE[: min(cut)] + put + WHOLE[max(cut) :])
    with contextlib.suppress(ValueError):
        read_tokens(path)
        return
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: ") as caught:
        read_tokens(path)
    assert SECRET not in str(caught.value)


def test_no_two_tenants_and_salts_share_a_namespace():
    callers = [Caller(name, tenant, frozenset()) for name, tenant in (("x", "a"), ("y", "ab"))]
    pairs = [(caller, salt) for caller in callers for salt in ("", "b", "b/", "/b", "/")]
    assert len({caller.namespace(salt) for caller, salt in pairs}) == len(pairs)
    assert Caller("z", "a", frozenset()).namespace("b") == callers[0].namespace("b")
