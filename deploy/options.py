"""What `kvrelay serve` can be told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvrelay.deploy.address import MAX_PORT, Address
from kvrelay.deploy.errors import OptionError
from kvrelay.engine.config import Speculation
from kvrelay.engine.faults import parse_faults
from kvrelay.kv_transfer.checksums import VerifyPages
from kvrelay.net.tls import TlsFileError, TlsFiles
from kvrelay.router.auth import read_tokens

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
DEFAULT_GRPC: Final = Address("127.0.0.1", 50051)
DEFAULT_METRICS: Final = Address("127.0.0.1", 9400)
DEFAULT_WORKER_TIMEOUT: Final = 15.0
DEFAULT_DRAIN_GRACE: Final = 30.0
DEFAULT_QUARANTINE_LIMIT: Final = 600.0
WORKER_HOST: Final = "127.0.0.1"
"""Routers and workers are on one machine; nobody else needs to reach a worker."""
PAGE_ORDERS: Final = ("page_first", "layer_first")
PREFIX_INDEXES: Final = ("radix", "none")
DTYPES: Final = ("bfloat16", "float16", "float32")
DEVICES: Final = ("auto", "cpu", "cuda")
SPECULATIONS: Final = tuple(one.value for one in Speculation)
VERIFY_PAGES: Final = tuple(one.value for one in VerifyPages)

_AT_LEAST_ONE: Final = (
    "page_size",
    "kv_memory",
    "max_running",
    "chunk_tokens",
    "default_max_tokens",
    "max_live_requests",
    "num_draft_tokens",
)
_AT_LEAST_ZERO: Final = ("aggregated", "bypass_limit", "debug_retract_every")
_AT_LEAST_ONE_IF_GIVEN: Final = ("max_model_len", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """A cluster on one machine, as asked for; checked when it is made.

    An unusable value raises OptionError, which names the option.
    """

    model: str = DEFAULT_MODEL
    """A checkpoint folder, a .gguf file, a hub id, or an alias."""
    model_name: str | None = None
    """What clients call the model; None: from `model`."""
    prefill: int | None = None
    decode: int | None = None
    """Workers of either role; None: 1, or none beside aggregated ones."""
    aggregated: int = 0
    """Workers that do both, in place of the others."""
    page_size: int = 16
    page_order: str = "page_first"
    prefix_index: str = "radix"
    """How workers find prefixes again."""
    kv_memory: int = 512 << 20
    """Bytes of each worker's pool."""
    dtype: str = "bfloat16"
    device: str = "auto"
    grpc: Address = DEFAULT_GRPC
    metrics: Address = DEFAULT_METRICS
    tls_cert: Path | None = None
    """With its key and authority, for TLS between router and workers, and at the front, too."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    front_tls_cert: Path | None = None
    """With its key, what clients are shown in place of `tls_cert`."""
    front_tls_key: Path | None = None
    auth_token_file: Path | None = None
    """Clients must bring one of the tokens in it; None: everybody may come."""
    insecure: bool = False
    """Allow addresses that other machines can reach without TLS and tokens."""
    max_running: int = 64
    chunk_tokens: int = 512
    max_model_len: int | None = None
    overlap: bool = True
    """Plan a step while the one before computes."""
    growth_min: float = 0.1
    growth_max: float = 1.0
    """Bounds of the part of a request's max_tokens that admission reserves for growth."""
    bypass_limit: int = 16
    """Requests that may pass one that does not fit, before none may."""
    speculation: str = "none"
    """Who drafts tokens that a step then verifies."""
    draft_model: str | None = None
    """The model that drafts, where one does; found like `model`."""
    num_draft_tokens: int = 4
    """Tokens in a draft at most."""
    verify_pages: str = "off"
    """Which pages' bytes are compared after they were read."""
    min_transfer_gbps: float = 0.0
    """Pairs of workers whose transport a probe finds slower do not work together."""
    strict: bool = False
    """Fail requests that would have to be computed again, unless they were retracted."""
    threads: int | None = None
    """Of one worker's forward; None: the machine's cores shared out."""
    default_max_tokens: int = 256
    max_live_requests: int = 1024
    worker_timeout: float = DEFAULT_WORKER_TIMEOUT
    """Seconds without an answer of its engine after which a worker is killed and replaced."""
    drain_grace: float = DEFAULT_DRAIN_GRACE
    """Seconds after which a worker that drains gives back what can go on elsewhere."""
    quarantine_limit: float = DEFAULT_QUARANTINE_LIMIT
    """Seconds that memory may be in quarantine until its worker drains; 0: for ever."""
    debug_retract_every: int = 0
    """Retract a request every so many steps, for tests; 0: only when memory is short."""
    debug_faults: str = ""
    """What is to go wrong, for tests and drills; see `engine.faults`."""
    audit_pages: bool = False
    """Check every single page after every step, not the sums alone."""

    def __post_init__(self) -> None:
        for field in _AT_LEAST_ONE:
            self._check_at_least(1, field, getattr(self, field))
        for field in _AT_LEAST_ONE_IF_GIVEN:
            if getattr(self, field) is not None:
                self._check_at_least(1, field, getattr(self, field))
        for field in _AT_LEAST_ZERO:
            self._check_at_least(0, field, getattr(self, field))
        self._check_roles()
        self._check_growth()
        self._check_faults()
        self._check_speculation()
        if not 0 < self.worker_timeout < float("inf"):
            raise OptionError("--worker-timeout", "must be seconds, more than 0")
        for field in ("drain_grace", "quarantine_limit"):
            if not 0 <= getattr(self, field) < float("inf"):  # so that NaN fails, too
                raise OptionError(option_name(field), "must be seconds, at least 0")
        if not 0 <= self.min_transfer_gbps < float("inf"):
            raise OptionError("--min-transfer-gbps", "must be GB/s, 0 or more")
        self._check_choice("verify_pages", self.verify_pages, VERIFY_PAGES)
        self._check_choice("page_order", self.page_order, PAGE_ORDERS)
        self._check_choice("prefix_index", self.prefix_index, PREFIX_INDEXES)
        self._check_choice("dtype", self.dtype, DTYPES)
        self._check_choice("device", self.device, DEVICES)
        for field in ("model", "model_name", "draft_model"):
            if getattr(self, field) is not None and not getattr(self, field).strip():
                raise OptionError(option_name(field), "must not be empty")
        check_together(tls_cert=self.tls_cert, tls_key=self.tls_key, tls_ca=self.tls_ca)
        check_together(front_tls_cert=self.front_tls_cert, front_tls_key=self.front_tls_key)
        self._check_reach()
        self._check_worker_ports()

    @staticmethod
    def _check_at_least(least: int, field: str, value: int) -> None:
        if value < least:
            raise OptionError(option_name(field), f"must be at least {least}, got {value}")

    def _check_roles(self) -> None:
        for field in ("prefill", "decode"):
            count = getattr(self, field)
            if count is None:
                continue
            if not self.aggregated:
                self._check_at_least(1, field, count)
            elif count:
                raise OptionError(
                    "--aggregated",
                    f"such workers do prefill and decode both: leave {option_name(field)} out",
                )

    def _check_growth(self) -> None:
        for field in ("growth_min", "growth_max"):
            value = getattr(self, field)
            if not 0 <= value <= 1:  # so that NaN fails, too
                raise OptionError(option_name(field), f"must be in [0, 1], got {value:g}")
        if self.growth_min > self.growth_max:
            raise OptionError(
                "--growth-min", f"must not be above --growth-max, {self.growth_max:g}"
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

    def _check_speculation(self) -> None:
        self._check_choice("speculation", self.speculation, SPECULATIONS)
        drafts = self.speculation == "draft"
        if drafts and self.draft_model is None:
            raise OptionError("--draft-model", "must be given with --speculation draft")
        if self.draft_model is not None and not drafts:
            raise OptionError("--draft-model", "must be given with --speculation draft alone")

    @staticmethod
    def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
        if value not in choices:
            expected = ", ".join(choices)
            raise OptionError(option_name(field), f"must be one of {expected}, got {value!r}")

    def _check_reach(self) -> None:
        if self.insecure:
            return
        lacking = []
        if self.front_tls is None:
            lacking.append("--tls-cert or --front-tls-cert")
        if self.auth_token_file is None:
            lacking.append("--auth-token-file")
        if lacking and not self.grpc.is_loopback:
            raise OptionError(
                "--grpc",
                f"{self.grpc} can be reached from other machines: give {' and '.join(lacking)}, "
                "listen on 127.0.0.1, or allow it as it is with --insecure",
            )
        if not self.metrics.is_loopback:
            raise OptionError(
                "--metrics",
                f"{self.metrics} can be reached from other machines, and metrics are in plain "
                "text, for everybody: listen on 127.0.0.1, or allow it with --insecure",
            )

    def _check_worker_ports(self) -> None:
        if self.metrics.port == 0:
            return
        last = self.metrics.port + self.workers
        if last > MAX_PORT:
            raise OptionError("--metrics", f"the workers take the ports up to {last}: too many")
        if self.metrics.port <= self.grpc.port <= last:
            raise OptionError(
                "--metrics",
                f"router and workers take the ports {self.metrics.port} to {last}, "
                f"and --grpc one of them: {self.grpc.port}",
            )

    def worker_metrics(self) -> tuple[Address, ...]:
        """Where each worker's metrics are, in the order of `roles`; none if any port will do.

        Fixed ports, so that what reads them finds a restarted worker again.
        """
        if self.metrics.port == 0:
            return ()
        first = self.metrics.port + 1
        return tuple(Address(WORKER_HOST, first + number) for number in range(self.workers))

    @property
    def cluster_tls(self) -> TlsFiles | None:
        """What router and workers show each other; None: plain text."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        # A worker's working directory is another.
        return TlsFiles(self.tls_cert.absolute(), self.tls_key.absolute(), self.tls_ca.absolute())

    @property
    def front_tls(self) -> TlsFiles | None:
        """What clients are shown; None: plain text."""
        if self.front_tls_cert is not None and self.front_tls_key is not None:
            return TlsFiles(self.front_tls_cert, self.front_tls_key)
        if self.tls_cert is not None and self.tls_key is not None:
            return TlsFiles(self.tls_cert, self.tls_key)
        return None

    def check_files(self) -> None:
        """Raise OptionError for the first file of TLS or tokens that cannot be used."""
        check_tls("tls", self.cluster_tls, WORKER_HOST)
        if self.front_tls_cert is not None:
            check_tls("front_tls", self.front_tls)
        if self.auth_token_file is not None:
            try:
                read_tokens(self.auth_token_file)
            except ValueError as error:
                raise OptionError("--auth-token-file", str(error)) from error

    @property
    def roles(self) -> dict[str, int]:
        """How many workers there are to be of each role."""
        if self.aggregated:
            return {"aggregated": self.aggregated}
        prefill = 1 if self.prefill is None else self.prefill
        decode = 1 if self.decode is None else self.decode
        return {"prefill": prefill, "decode": decode}

    @property
    def workers(self) -> int:
        """Workers of all roles."""
        return sum(self.roles.values())

    def threads_per_worker(self) -> int:
        """Threads of one worker's forward: as asked, or a fair share of the cores."""
        if self.threads is not None:
            return self.threads
        return max(1, len(os.sched_getaffinity(0)) // self.workers)


def check_together(**fields: Path | None) -> None:
    """Raise OptionError unless all of the files are given, or none."""
    given = [field for field, path in fields.items() if path is not None]
    missing = [field for field, path in fields.items() if path is None]
    if given and missing:
        raise OptionError(option_name(missing[0]), f"must be given with {option_name(given[0])}")


def check_tls(prefix: str, files: TlsFiles | None, host: str | None = None) -> None:
    """Raise OptionError if one of the files, whose options begin with `prefix`, is of no use."""
    try:
        if files is not None:
            files.check(host)
    except TlsFileError as error:
        raise OptionError(option_name(f"{prefix}_{error.field}"), error.problem) from error


def option_name(field: str) -> str:
    """A field of ServeOptions as the command line spells it."""
    return "--" + field.replace("_", "-")
