"""Callers: the name, the rights and the limits that go with a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Right(StrEnum):
    """A right that a token may have."""

    GENERATE = "generate"
    """The right to Generate, Abort, Tokenize and Detokenize."""
    ADMIN = "admin"
    """The right to the admin service, the metrics at --http, and workers' views of all prompts."""
    PRIORITIES = "priorities"
    """The right to a priority below 0, before the requests of others."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A client, as its token identifies it. Request ids belong to its name."""

    name: str
    """The token's name, unique in its file; empty if the router asks for no token."""
    tenant: str
    """The tenant; only callers of one tenant find each other's cached prefixes."""
    rights: frozenset[Right]
    max_live_requests: int | None = None
    """The most live requests at the same time; None: no limit of its own."""
    max_queued_prompt_tokens: int | None = None
    """The most prompt tokens of its requests that wait for their first token; None: no limit."""
    max_grammar_bytes: int | None = None
    """The most bytes of its live requests' grammars, together; None: no limit of its own."""
    connection: str = ""
    """The connection of the present call, which is the caller where there are no tokens."""

    @property
    def turn(self) -> str:
        """The name in whose turn its work is done: the token's, or the connection's."""
        return self.name or self.connection

    def at(self, connection: str) -> Caller:
        """Return the same caller, as it calls on this connection."""
        return replace(self, connection=connection)

    def may(self, right: Right) -> bool:
        """Whether the caller has this right."""
        return right in self.rights

    def namespace(self, cache_salt: str) -> str:
        """The part of the prefix index that the caller's requests with this salt use.

        Two different pairs never have the same one, because a tenant contains no slash.
        """
        return f"{self.tenant}/{cache_salt}"


ANYBODY = Caller("", "", frozenset(Right))
"""The caller of a router that asks for no token."""
STRANGER = Caller("", "", frozenset())
"""The caller of a method that needs no token, where others need one."""
