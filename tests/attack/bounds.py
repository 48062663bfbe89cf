"""What each attack may cost a router, as the attacks assert and `docs/security.md` tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_MIB: Final = 128
MOST_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that an attack may cost."""

    what: str
    """What the attackers do."""
    mib: int = MOST_MIB
    """MiB of the router above what it had before."""
    stall_seconds: float = MOST_SECONDS
    """Seconds that the router may compute while another caller's health check waits: the longest
    stall of its loop, and what its other threads compute meanwhile."""
    answer_seconds: float = 5.0
    """Seconds that another caller's completion of eight tokens may take."""


BOUNDS: Final[dict[str, Bound]] = {
    "silent watchers": Bound("watch and check health, with a window of 0, and read nothing"),
    "long names": Bound("watch services with names of 16 MiB", mib=320),
    "half-open checks": Bound("begin 300 health checks a second, and never send their messages"),
    "unread answers": Bound("tokenize 60 KiB again and again, and read nothing", mib=224),
    "half-open calls": Bound("announce messages of 16 MiB, and send 100 bytes of them", mib=192),
    "tokenizing": Bound("tokenize 300 texts of 60 KiB at once", mib=224),
    "joining": Bound("join one live request 200 times"),
    "unknown histories": Bound("open 400 sessions with the history of a digest that nobody has"),
    "many sessions": Bound("open 2,000 sessions, and list them 30 times at once", mib=192),
    "settings": Bound("send settings without end"),
    "pings": Bound("send pings without end"),
    "resets": Bound("begin calls, and reset them at once"),
    "continuations": Bound("send headers without end"),
    "large heads": Bound("send heads of 1 MiB, by gRPC and by HTTP"),
    "compressed messages": Bound("send 15 KiB that are 15 MiB once they are decompressed", mib=256),
    "many fields": Bound("send token ids one by one, a million in a message", mib=256),
    "trailers": Bound("send 8 MiB of trailers behind a body"),
    "empty lines": Bound("send empty lines after an answer, without end"),
    "slow streams": Bound("ask for long streams by HTTP, and read nothing"),
    "trickled heads": Bound("send a head by HTTP three bytes at a time"),
    "nested bodies": Bound("send JSON of 200,000 brackets, and of a million small tokens", mib=256),
    "large parameters": Bound(
        "send 100,000 biases, 10,000 stop strings, a huge n, and a schema of 1 MiB", mib=192
    ),
    "largest parameters": Bound(
        "ask for 16 choices, with 200 biases, 16 stop strings and 20 log-probabilities a token"
    ),
    "tool lists": Bound("send 128 tools, which may or must be called, and 20,000"),
    "handshakes": Bound("begin TLS handshakes, some to the end, and hang up"),
    "log lines": Bound("send request ids with line ends and colours"),
}
"""The attacks by name."""


def markdown() -> str:
    """The table of `docs/security.md`."""
    rows = [
        f"| {bound.what} | {bound.mib} MiB | {bound.stall_seconds:g} s | "
        f"{bound.answer_seconds:g} s |"
        for bound in BOUNDS.values()
    ]
    head = (
        "| strangers or clients without end, who … | router's memory above before | another's "
        "health check waits | another's short completion |\n| --- | ---: | ---: | ---: |"
    )
    return "\n".join([head, *rows])
