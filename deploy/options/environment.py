"""The environment variables that the commands read or set.

Some more are used elsewhere. Compiled kernels and tokenizers that were made are in XDG_CACHE_HOME.
`kv_transfer` reports and sets some of UCX's (`kv_transfer/ucx_settings.py`), and `text` sets
TOKENIZERS_PARALLELISM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvrelay.deploy.errors import DeployError
from kvrelay.options.user_cache import cache_home
from kvrelay.router.access.token_file import is_token

TOKEN_VARIABLE = "KVRELAY_TOKEN"  # noqa: S105 (a name)
_ONE_MACHINE = {
    # Ray's processes then listen on loopback alone. This is the switch's name on Linux, too;
    # `ray.init(_node_ip_address="127.0.0.1")` would be resolved to another interface's address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Settings that keep the processes of a single-machine Ray from listening to other machines."""
_RAY_SETTINGS = {
    # Ray's metrics take any free port, so that several clusters run beside each other.
    "AUTOSCALER_METRIC_PORT": "0",
    "DASHBOARD_METRIC_PORT": "0",
    # No usage report leaves the machine, and no notice about it is printed.
    "RAY_USAGE_STATS_ENABLED": "0",
    # This is the default; Ray announces it at every start unless it is set.
    "RAY_AUTH_MODE": "token",
    # Chooses the future behaviour, of which Ray otherwise warns.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Nobody reads Ray's own metrics and events, nor the times of its event loops.
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    # Nor what its agent finds out of processes, each 5 s.
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    # Objects to move, spare processes and garbage are looked for each second, not 5 to 10 times.
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_kill_idle_workers_interval_ms": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    # Look for logs of new processes twice a second, not ten times; known ones are read as before.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    # A worker computes at the priority of the command; Ray would let all else go first.
    "RAY_worker_niceness": "0",
    # The supervisor logs one line for a dead worker, in place of Ray's paragraph.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed while executing",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """The commands' inputs from environment variables."""

    cache_home: Path
    """XDG_CACHE_HOME, or ``~/.cache``: converted models lie below it."""
    token: str | None = field(default=None, repr=False)
    """KVRELAY_TOKEN: the token that a client sends to a cluster that asks for one."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Self:
        """Read and check; an empty variable counts as unset.

        Raises DeployError, naming the variable, for a value that cannot be used.
        """
        return cls(_cache_home(variables), _token(variables))


def _cache_home(variables: Mapping[str, str]) -> Path:
    try:
        return cache_home(variables)
    except ValueError as error:
        raise DeployError(str(error)) from error


def _token(variables: Mapping[str, str]) -> str | None:
    token = variables.get(TOKEN_VARIABLE, "")
    if token and not is_token(token):
        raise DeployError(f"{TOKEN_VARIABLE}: is not a token: letters, digits, -._~+/ and =")
    return token or None


def set_process_variables() -> None:
    """Set what Ray reads at its import, and workers inherit; the user's own values stay."""
    for name, value in (_RAY_SETTINGS | _ONE_MACHINE).items():
        os.environ.setdefault(name, value)


def allow_many_machines() -> None:
    """Let Ray find the address by which other machines reach this one; call before its import."""
    for name in _ONE_MACHINE:
        os.environ.setdefault(name, "1")


def set_network_devices(devices: str) -> None:
    """Let UCX use these network devices, unless its user set some; call before NIXL's import."""
    os.environ.setdefault("UCX_NET_DEVICES", devices)
