"""The configuration of each worker: the options of the start, as changed by rolls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import click

from kvrelay.deploy.controller.records.ordered_changes import Revision
from kvrelay.deploy.controller.records.records import WorkerRecord
from kvrelay.deploy.options.option_flags import type_of
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.engine.config import Speculation, WorkerConfig, WorkerOptions
from kvrelay.options.declaration import Option, options_of
from kvrelay.wire.worker_info import WorkerRole

_OPTIONS: Final = {one.name: one for one in options_of(ServeOptions)}
_OF_WORKERS: Final = {one.name for one in options_of(WorkerOptions)} | {"threads"}
_FIT: Final = "old and new workers read each other's pages, and go on with each other's requests"
_KEPT: Final = {
    "dtype": _FIT,
    "kv_dtype": _FIT,
    "page_size": _FIT,
    "batch_invariant": "a request that goes on at another worker has to get the same tokens there",
}
"""The workers' options that must always be the same in a whole cluster, and the reasons."""


class WorkerConfigs:
    """The configuration of each worker of a cluster, by name, role and revision.

    Args:
        first: the configurations of the workers that the cluster begins with.
    """

    def __init__(self, first: Sequence[WorkerConfig]) -> None:
        self.first = tuple(first)
        """The configurations of the workers that the cluster begins with."""

    def of(self, name: str, role: WorkerRole, revision: Revision) -> WorkerConfig:
        """Return a worker's configuration: its own, or a copy of that of the first of its role."""
        return self._of_start(name, role).with_options(read_options(revision.options))

    def of_record(self, record: WorkerRecord) -> WorkerConfig:
        """Return the configuration of the worker with this record."""
        return self.of(record.name, record.role, record.revision)

    def check(self, before: Revision, after: Revision) -> None:
        """Raise ValueError, which names the option, unless workers of both can share a cluster."""
        for role in {config.role for config in self.first}:
            old, new = self.of("", role, before), self.of("", role, after)
            if old.lease_seconds != new.lease_seconds:
                name = "worker_lease" if old.worker_lease != new.worker_lease else "worker_timeout"
                raise ValueError(
                    f"{name}: workers would have leases of {new.lease_seconds:g} s, and the "
                    f"controller gives all of them {old.lease_seconds:g} s"
                )
            speculations = {old.speculation, new.speculation}
            if len(speculations) > 1 and Speculation.DRAFT in speculations:
                raise ValueError(f"speculation: the draft model belongs to the model: {_FIT}")

    def _of_start(self, name: str, role: WorkerRole) -> WorkerConfig:
        for config in self.first:
            if config.name == name:
                return config
        like = next(config for config in self.first if config.role is role)
        faults = None if like.faults is None else ()
        return replace(like, name=name, metrics_port=0, grpc_port=0, faults=faults)


def read_options(texts: Mapping[str, str]) -> dict[str, Any]:
    """Read workers' options by field from their texts on a command line.

    Raises ValueError, which names the option, for an illegal value, and for an option that cannot
    differ between workers.
    """
    return {(option := rolled(name)).name: _value(option, text) for name, text in texts.items()}


def rolled(name: str) -> Option:
    """Return the option of this name, which may have dashes.

    Raises ValueError, which names it, if it cannot differ between workers.
    """
    name = name.removeprefix("--").replace("-", "_")
    if name not in _OPTIONS:
        raise ValueError(f"{name}: there is no such option")
    if name in _KEPT:
        raise ValueError(
            f"{name}: workers of one cluster cannot differ in it: {_KEPT[name]}. "
            "Start a second cluster with it"
        )
    if name not in _OF_WORKERS:
        raise ValueError(f"{name}: is no option of workers alone: start a second cluster with it")
    return _OPTIONS[name]


def _value(option: Option, text: str) -> Any:
    try:
        value = type_of(option).convert(text, None, None)
        return option.checked(value)
    except click.UsageError as error:
        raise ValueError(f"{option.name}: {error.message}") from error
    except ValueError as error:
        raise ValueError(f"{option.name}: {error}") from error
