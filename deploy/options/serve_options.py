"""The options of `kvrelay serve`: the workers', the router's, and the cluster's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvrelay.deploy.errors import OptionError
from kvrelay.deploy.options.listen_address import (
    DEFAULT_ADMIN,
    DEFAULT_GRPC,
    DEFAULT_HTTP,
    DEFAULT_METRICS,
    MAX_PORT,
    Address,
)
from kvrelay.deploy.options.machine_options import MachineOptions
from kvrelay.deploy.options.tls_options import check_tls, check_together
from kvrelay.engine.config import Speculation, WorkerOptions
from kvrelay.engine.faults import parse_faults
from kvrelay.net.tls import TlsFiles
from kvrelay.observe.otlp import SpanCollector
from kvrelay.options.declaration import Section, flag_of, option, options_of
from kvrelay.router.access.token_file import read_tokens
from kvrelay.router.config import RouterOptions

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
WORKER_HOST: Final = "127.0.0.1"
"""The host at which workers listen if all of them run on this machine."""


def names_in(text: str) -> tuple[str, ...]:
    """Return the names between commas; raise ValueError if one is empty."""
    names = tuple(one.strip() for one in text.split(","))
    if not all(names):
        raise ValueError("must be names, separated by commas")
    return names


@dataclass(frozen=True, kw_only=True)
class ServeOptions(RouterOptions, WorkerOptions, MachineOptions):
    """The options of a cluster; they are checked when the object is made.

    `WorkerOptions` and `RouterOptions` declare the options that workers and router read unchanged;
    those here are read by `deploy`. An unusable value raises OptionError, which names the option.
    """

    model: str = option(
        DEFAULT_MODEL,
        f"The model: a checkpoint folder (safetensors), a .gguf file, a hub id (owner/name), or "
        f"the alias {DEFAULT_MODEL}.",
        Section.MODEL,
        metavar="PATH_OR_ID",
    )
    model_name: str | None = option(
        None,
        "What clients call the model: one name or several, separated by commas. Answers have the "
        "name that was asked for, and metrics the first.",
        Section.MODEL,
        check=names_in,
        shown_default="from --model",
    )
    device: str = option(
        "auto",
        "Where workers compute; auto takes cuda if this machine has it.",
        Section.MODEL,
        choices=("auto", "cpu", "cuda"),
    )
    prefill: int | None = option(
        None, "Number of prefill workers.", Section.WORKERS, at_least=0, shown_default="1"
    )
    decode: int | None = option(
        None, "Number of decode workers.", Section.WORKERS, at_least=0, shown_default="1"
    )
    aggregated: int = option(
        0,
        "Number of workers that do prefill and decode both, in place of the other two kinds.",
        Section.WORKERS,
        at_least=0,
    )
    threads: int | None = option(
        None,
        "CPU threads that one worker computes with.",
        Section.WORKERS,
        at_least=1,
        shown_default="an equal share of the cores",
    )
    draft_model: str | None = option(
        None,
        "The model that guesses with --speculation draft; given like --model.",
        Section.SPECULATION,
        metavar="PATH_OR_ID",
    )
    grpc: Address = option(
        DEFAULT_GRPC, "Where clients connect; port 0: any free one.", Section.ACCESS
    )
    http: Address = option(
        DEFAULT_HTTP,
        "Where clients of OpenAI's API connect; port 0: any free one. So it is where the default "
        "port is in use.",
        Section.ACCESS,
    )
    admin: Address = option(
        DEFAULT_ADMIN,
        "Where operators connect, to drain workers; port 0: any free one. With "
        "--auth-token-file a token with the right admin is needed.",
        Section.ACCESS,
    )
    metrics: Address = option(
        DEFAULT_METRICS,
        f"Where Prometheus reads the router's metrics; the workers' are at the next ports of "
        f"{WORKER_HOST}, prefill workers first. Port 0: any free ports.",
        Section.ACCESS,
    )
    tls_cert: Path | None = option(
        None,
        f"A certificate in PEM for TLS between router and workers, and for clients. It must name "
        f"{WORKER_HOST}, where workers listen, or --tls-name. Every node has it at this path.",
        Section.ACCESS,
    )
    tls_key: Path | None = option(None, "The private key of --tls-cert.", Section.ACCESS)
    tls_ca: Path | None = option(
        None,
        "The authority that signed --tls-cert: router and workers refuse any process that shows no "
        "certificate of it.",
        Section.ACCESS,
    )
    tls_name: str | None = option(
        None,
        "What workers' certificates must name, so that one certificate can do for all nodes.",
        Section.ACCESS,
        shown_default="the host where the worker listens",
    )
    front_tls_cert: Path | None = option(
        None,
        "A certificate in PEM for TLS with clients, in place of --tls-cert or without it.",
        Section.ACCESS,
    )
    front_tls_key: Path | None = option(
        None, "The private key of --front-tls-cert.", Section.ACCESS
    )
    insecure: bool = option(
        False,
        "Allow --grpc, --http and --admin addresses that other machines can reach without TLS and "
        "tokens, "
        "and such a --metrics address, which never has either.",
        Section.ACCESS,
    )
    debug_faults: str = option(
        "",
        "Faults to inject: [WORKER/]ACTION:WHERE[@REQUEST][:N][:SECONDSs][:always], separated by "
        "commas; for example "
        "delay:pull:3:0.5s or prefill-0/kill:announced.",
        Section.DEBUGGING,
        metavar="SPECS",
        shown_default="none",
    )

    def __post_init__(self) -> None:
        for one in options_of(type(self)):
            try:
                checked = one.checked(getattr(self, one.name))
            except ValueError as error:
                raise OptionError(one.flag, str(error)) from error
            object.__setattr__(self, one.name, checked)
        self._check_roles()
        self._check_growth()
        self._check_lease()
        self._check_faults()
        self._check_collector()
        self._check_speculation()
        check_together(tls_cert=self.tls_cert, tls_key=self.tls_key, tls_ca=self.tls_ca)
        check_together(front_tls_cert=self.front_tls_cert, front_tls_key=self.front_tls_key)
        if self.tls_name is not None and self.tls_cert is None:
            raise OptionError("--tls-name", "must be given with --tls-cert")
        self.check_machines()
        self._check_reach()
        self._check_ports()

    def _check_roles(self) -> None:
        for field in ("prefill", "decode"):
            count = getattr(self, field)
            if count is None:
                continue
            if not self.aggregated and not count:
                raise OptionError(flag_of(field), f"must be at least 1, got {count}")
            if self.aggregated and count:
                raise OptionError(
                    "--aggregated",
                    f"such workers do prefill and decode both: leave {flag_of(field)} out",
                )

    def _check_growth(self) -> None:
        if self.growth_min > self.growth_max:
            raise OptionError(
                "--growth-min", f"must not be above --growth-max, {self.growth_max:g}"
            )

    def _check_lease(self) -> None:
        if self.worker_lease is not None and self.worker_lease < 3 * self.worker_timeout:
            raise OptionError(
                "--worker-lease",
                f"must be at least three times --worker-timeout, {self.worker_timeout:g}: a worker "
                "that is slow to answer would end itself",
            )

    def _check_faults(self) -> None:
        try:
            faults = parse_faults(self.debug_faults)
        except ValueError as error:
            raise OptionError("--debug-faults", str(error)) from error
        names = {f"{role}-{n}" for role, count in self.roles.items() for n in range(count)}
        for fault in faults:
            if fault.worker and fault.worker not in names:
                raise OptionError("--debug-faults", f"there is no worker {fault.worker}")

    def _check_collector(self) -> None:
        if self.otlp is None:
            return
        try:
            SpanCollector.parse(self.otlp)
        except ValueError as error:
            raise OptionError("--otlp", str(error)) from error

    def _check_speculation(self) -> None:
        drafts = self.speculation is Speculation.DRAFT
        if drafts and self.draft_model is None:
            raise OptionError("--draft-model", "must be given with --speculation draft")
        if self.draft_model is not None and not drafts:
            raise OptionError("--draft-model", "must be given with --speculation draft alone")

    def _check_reach(self) -> None:
        if self.insecure:
            return
        if not self.listens_on_loopback and self.cluster_tls is None:
            raise OptionError(
                "--ray-address",
                "workers listen at their nodes' addresses, which other machines can reach: give "
                "--tls-cert, --tls-key and --tls-ca, or allow it as it is with --insecure",
            )
        lacking = []
        if self.front_tls is None:
            lacking.append("--tls-cert or --front-tls-cert")
        if self.auth_token_file is None:
            lacking.append("--auth-token-file")
        for flag, address in self._listeners():
            if lacking and not address.is_loopback:
                raise OptionError(
                    flag,
                    f"{address} can be reached from other machines: give {' and '.join(lacking)}, "
                    "listen on 127.0.0.1, or allow it as it is with --insecure",
                )
        if not self.metrics.is_loopback:
            raise OptionError(
                "--metrics",
                f"{self.metrics} can be reached from other machines, and metrics are in plain "
                "text, for everybody: listen on 127.0.0.1, or allow it with --insecure",
            )

    def _listeners(self) -> tuple[tuple[str, Address], ...]:
        """Return the router's listening addresses, with their options."""
        return (("--grpc", self.grpc), ("--http", self.http), ("--admin", self.admin))

    def _check_ports(self) -> None:
        taken: dict[int, str] = {}
        for flag, address in self._listeners():
            if address.port and address.port in taken:
                other = taken[address.port]
                raise OptionError(flag, f"{other} takes the port {address.port}, too")
            taken[address.port] = flag
        if self.metrics.port == 0:
            return
        last = self.metrics.port + len(self.worker_metrics())
        if last > MAX_PORT:
            raise OptionError("--metrics", f"the workers take the ports up to {last}: too many")
        for flag, address in self._listeners():
            if self.metrics.port <= address.port <= last:
                raise OptionError(
                    "--metrics",
                    f"metrics take the ports {self.metrics.port} to {last}, and {flag} one of "
                    f"them: {address.port}",
                )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names for clients; empty: the one that --model has."""
        return names_in(self.model_name) if self.model_name is not None else ()

    def worker_metrics(self) -> tuple[Address, ...]:
        """Return the addresses of the workers' metrics in `roles`' order; none if any port will do.

        The ports are fixed, so that Prometheus finds a restarted worker again.
        """
        if self.metrics.port == 0:
            return ()
        first = self.metrics.port + 1
        return tuple(Address(WORKER_HOST, first + number) for number in range(self.workers))

    @property
    def cluster_tls(self) -> TlsFiles | None:
        """The certificate that router and workers show each other; None: plain text."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        # Absolute, because a worker has another working directory.
        return TlsFiles(
            self.tls_cert.absolute(),
            self.tls_key.absolute(),
            self.tls_ca.absolute(),
            self.tls_name,
        )

    @property
    def front_tls(self) -> TlsFiles | None:
        """The certificate that clients are shown; None: plain text."""
        if self.front_tls_cert is not None and self.front_tls_key is not None:
            return TlsFiles(self.front_tls_cert, self.front_tls_key)
        if self.tls_cert is not None and self.tls_key is not None:
            return TlsFiles(self.tls_cert, self.tls_key)
        return None

    @property
    def admin_tls(self) -> TlsFiles | None:
        """The certificate that operators are shown; None: plain text.

        On loopback it is --tls-cert, which names that address; a certificate for clients seldom
        does.
        """
        if not self.admin.is_loopback:
            return self.front_tls
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key)

    def check_files(self) -> None:
        """Raise OptionError for the first TLS or token file that cannot be used."""
        check_tls("tls", self.cluster_tls, self._certified_host())
        if self.front_tls_cert is not None:
            check_tls("front_tls", self.front_tls)
        if self.auth_token_file is not None:
            try:
                read_tokens(self.auth_token_file)
            except ValueError as error:
                raise OptionError("--auth-token-file", str(error)) from error

    def _certified_host(self) -> str | None:
        """Return the host that --tls-cert must name here; None: any."""
        return self.tls_name or (WORKER_HOST if self.listens_on_loopback else None)

    @property
    def roles(self) -> dict[str, int]:
        """The number of workers of each role."""
        if self.aggregated:
            return {"aggregated": self.aggregated}
        prefill = 1 if self.prefill is None else self.prefill
        decode = 1 if self.decode is None else self.decode
        return {"prefill": prefill, "decode": decode}

    @property
    def workers(self) -> int:
        """The number of workers of all roles."""
        return sum(self.roles.values())

    def threads_per_worker(self) -> int:
        """Return the CPU threads of one worker: the number given, or an equal share of cores."""
        if self.threads is not None:
            return self.threads
        if self.joins_ray:
            return self.worker_cpus
        return max(1, len(os.sched_getaffinity(0)) // self.workers)


@dataclass(frozen=True, kw_only=True)
class RouterProcessOptions(ServeOptions):
    """The options of `kvrelay router`, which has no workers of its own, and no --admin.

    The cluster's workers may listen anywhere. They check that --tls-ca has signed a router's
    certificate, but not the name in it.
    """

    def worker_metrics(self) -> tuple[Address, ...]:
        """Return nothing: a router has no workers of its own."""
        return ()

    def _listeners(self) -> tuple[tuple[str, Address], ...]:
        return (("--grpc", self.grpc), ("--http", self.http))

    def _certified_host(self) -> str | None:
        return None
