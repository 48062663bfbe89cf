"""Why tests with hosts are skipped on this machine."""

from __future__ import annotations

from tests.hosts.commands import why_not

WHY_NO_HOSTS = why_not(("ip", "tc", "ss", "unshare", "nsenter", "setpriv"))
