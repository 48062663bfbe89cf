"""The rules of the doors as Markdown, and what attacks may cost, from the tables that hold them."""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.net.door_rules import ANY_NUMBER, LISTENERS, ListenerRule, MethodRule
from tests.attack import bounds

_COLUMNS = (
    "method",
    "who may call it",
    "largest message",
    "to arrive",
    "open calls of a caller, of all",
    "answer waits",
    "turns",
)


def door_rules() -> str:
    """A table for each listener."""
    return "\n\n".join(_listener(name, rule) for name, rule in LISTENERS.items())


def attack_bounds() -> str:
    """The table of attacks."""
    return bounds.markdown()


def _listener(name: str, listener: ListenerRule) -> str:
    most, idle = listener.most_connections, listener.idle_seconds
    facts = [
        "half as many connections as the process may open files" if most is None else _many(most),
        f"{listener.begin_seconds:g} s to begin",
        "any time idle" if idle is None else f"{idle:g} s idle",
        f"heads of {_size(listener.most_head_bytes)}",
    ]
    if listener.most_receiving:
        facts.append(f"{listener.most_receiving} messages that arrive at once")
    if listener.most_receiving_of_strangers:
        facts[-1] += f", {listener.most_receiving_of_strangers} of strangers"
    facts.append(f"before the caller is known {listener.cost}")
    rows = [
        f"**{name}**: {'; '.join(facts)}.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{' --- |' * len(_COLUMNS)}",
    ]
    return "\n".join([*rows, *_rows(listener)])


def _rows(listener: ListenerRule) -> Iterator[str]:
    """A row for each rule, with all methods that have it."""
    by_rule: dict[MethodRule, list[str]] = {}
    for method, rule in listener.methods.items():
        by_rule.setdefault(rule, []).append(f"`{_short(method)}`")
    for rule, methods in by_rule.items():
        size = listener.most_bytes if rule.most_bytes is None else rule.most_bytes
        counts = (rule.most_of_a_caller, rule.most)
        cells = (
            ", ".join(methods),
            rule.access.value,
            "2 × `--max-message-bytes`" if size is None else _size(size),
            f"{rule.receive_seconds:g} s" if rule.most_bytes != 0 else "",
            ", ".join("any" if one is None else f"{one:,}" for one in counts),
            "its reader's time" if rule.answer_seconds is None else f"{rule.answer_seconds:g} s",
            rule.order.value,
        )
        yield f"| {' | '.join(cells)} |"


def _short(method: str) -> str:
    """The service and the method, without the package."""
    return method if " " in method else ".".join(method.split(".")[-1].split("/")).strip(".")


def _many(connections: int) -> str:
    return (
        "any number of connections" if connections == ANY_NUMBER else f"{connections:,} connections"
    )


def _size(num_bytes: int) -> str:
    if not num_bytes:
        return "none"
    if num_bytes < 1 << 10:
        return f"{num_bytes} bytes"
    if num_bytes < 1 << 20:
        return f"{num_bytes >> 10} KiB"
    return f"{num_bytes >> 20} MiB"
