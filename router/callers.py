"""Who calls: the name, the rights and the limits that go with a token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Right(StrEnum):
    """What a token may be good for."""

    GENERATE = "generate"
    """Generate, Abort, Tokenize and Detokenize."""
    ADMIN = "admin"
    """The admin service, the metrics at --http, and what workers show of all tenants' prompts."""
    PRIORITIES = "priorities"
    """A request's priority may be below 0: before those of others."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A client, as its token identifies it. Request ids belong to its name."""

    name: str
    """Unique among the tokens; empty if the router asks for none."""
    tenant: str
    """Callers of one tenant find each other's cached prefixes, and no others do."""
    rights: frozenset[Right]
    max_live_requests: int | None = None
    """At the same time; None: no limit of its own."""
    max_queued_prompt_tokens: int | None = None
    """Of its requests that wait for their first token, together; None: no limit."""
    max_grammar_bytes: int | None = None
    """Of the grammars of its live requests, together; None: no limit of its own."""

    def may(self, right: Right) -> bool:
        """Whether it has this right."""
        return right in self.rights

    def namespace(self, cache_salt: str) -> str:
        """The part of the prefix index that its requests with this salt use.

        Two different pairs never have the same one, because a tenant contains no slash.
        """
        return f"{self.tenant}/{cache_salt}"


ANYBODY = Caller("", "", frozenset(Right))
"""Calls on a router that asks for no token."""
