"""The systems that are compared: how each is started, and when it is ready."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

MAX_MODEL_LEN = 2048
KV_GIBIBYTES = 1
"""KV memory of each worker or instance, of either engine."""
START_SECONDS = 600.0
"""For a system to get ready. vLLM compiles the model when it first runs on a machine."""
STOP_SECONDS = 60.0
_LOG_END_BYTES = 2000
_PORTS = (20_000, 32_000)
"""Of servers: Linux gives connections those from 32,768 on."""
_PORT_TRIES = 100


class StartError(RuntimeError):
    """A system that does not start, with the end of its log."""


@dataclass(frozen=True)
class Setup:
    """What all systems are started with."""

    model: Path
    """The checkpoint folder."""
    vllm: Path
    """The environment that vLLM is installed in."""
    logs: Path
    device: str = "cpu"
    """Of all systems: ``cpu`` or ``cuda``."""
    sglang: Path = Path(".venv-sglang")
    """The environment that SGLang is installed in."""


@dataclass(frozen=True)
class Serving:
    """A system that is ready: where its clients send their requests."""

    base_url: str
    prefill_url: str | None = None
    """The instance that a client asks for the KV of a prompt first, if there is one."""
    processes: tuple[subprocess.Popen[bytes], ...] = ()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        for process in self.processes:
            os.killpg(process.pid, number)


@dataclass(frozen=True)
class Command:
    """One server process."""

    name: str
    arguments: Sequence[str]
    port: int
    ready_line: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Kvrelay:
    """A cluster of ``kvrelay serve``."""

    name: str
    options: tuple[str, ...]
    title: str
    bears_stopping: bool = False
    """Its workers would miss signs of life of each other."""

    def commands(self, setup: Setup) -> list[Command]:
        """The one command that starts the cluster."""
        port = free_port()
        arguments = [
            *(sys.executable, "-m", "kvrelay.deploy", "serve"),
            *("--model", str(setup.model), "--max-model-len", str(MAX_MODEL_LEN)),
            *("--device", setup.device),
            *("--kv-memory", f"{KV_GIBIBYTES}GiB", "--prefix-index", "none"),
            *("--http", f"127.0.0.1:{port}", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
            *("--metrics", "127.0.0.1:0"),
            *self.options,
        ]
        return [Command(self.name, arguments, port, "Ctrl-C stops it.")]


@dataclass(frozen=True)
class Vllm:
    """``vllm serve``, or two instances that pass KV by NIXL.

    On a CPU, one has all cores and two have half of them each. On a GPU they share it. vLLM's
    processes look for messages of each other in a busy loop. Those of two instances would take
    each other's cores, so there they sleep between two looks (the Makefile's patch).
    """

    name: str
    title: str
    pair: bool = False
    options: tuple[str, ...] = ()
    bears_stopping: bool = True

    def commands(self, setup: Setup) -> list[Command]:
        """The prefill instance first, where there are two."""
        cores = sorted(os.sched_getaffinity(0))
        if not self.pair:
            return [self._command(setup, self.name, cores, {}, ())]
        half = max(1, len(cores) // 2)
        connector = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
        return [
            self._command(
                setup,
                f"{self.name}-{role}",
                part,
                # Each instance tells the other on a port of its own where its KV lies.
                {
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                    "UCX_NET_DEVICES": "lo",
                    "POLL_SECONDS": "0.0002",
                    "NIXL_POLL_MICROSECONDS": "200",
                },
                ("--kv-transfer-config", connector),
            )
            for role, part in (("prefill", cores[:half]), ("decode", cores[-half:]))
        ]

    def _command(
        self,
        setup: Setup,
        name: str,
        cores: Sequence[int],
        environment: Mapping[str, str],
        options: Sequence[str],
    ) -> Command:
        port = free_port()
        on_gpu = setup.device != "cpu"
        arguments = [
            *(str(setup.vllm / "bin" / "vllm"), "serve", str(setup.model)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"),
            *(_VLLM_GPU_MEMORY if on_gpu else ()),
            *options,
            *self.options,
        ]
        own = {} if on_gpu else _vllm_cpu_environment(setup.vllm, cores)
        environment = {**_environment(setup.vllm), **own, **environment}
        return Command(name, arguments, port, "Application startup complete.", environment)


_VLLM_GPU_MEMORY = (
    *("--kv-cache-memory-bytes", str(KV_GIBIBYTES << 30)),
    # What must be free at the start, also beside another instance.
    *("--gpu-memory-utilization", "0.3"),
)


def _environment(folder: Path) -> dict[str, str]:
    """Of an engine that is installed in `folder`."""
    return {
        "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', '')}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _vllm_cpu_environment(vllm: Path, cores: Sequence[int]) -> dict[str, str]:
    """As vLLM's documentation recommends for CPUs: Intel's OpenMP, a thread on each core.

    Left alone, vLLM reserves one core for its scheduler, which is half of a machine of two.
    """
    return {
        "LD_PRELOAD": str(vllm / "lib" / "libiomp5.so"),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIBIBYTES),
    }


@dataclass(frozen=True)
class Sglang:
    """``sglang.launch_server``, on a GPU alone."""

    name: str
    title: str
    bears_stopping: bool = False
    """Its watchdog ends it."""

    def commands(self, setup: Setup) -> list[Command]:
        """The one server. Raises ``StartError`` on a CPU."""
        if setup.device == "cpu":
            raise StartError("sglang is compared on a GPU alone: --device cuda")
        port = free_port()
        tokens = (KV_GIBIBYTES << 30) // _kv_token_bytes(setup.model)
        arguments = [
            *(str(setup.sglang / "bin" / "python"), "-m", "sglang.launch_server"),
            *("--model-path", str(setup.model), "--dtype", "bfloat16"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--context-length", str(MAX_MODEL_LEN), "--disable-radix-cache"),
            *("--max-total-tokens", str(tokens), "--mem-fraction-static", "0.3"),
        ]
        ready_line = "The server is fired up and ready to roll!"
        return [Command(self.name, arguments, port, ready_line, _environment(setup.sglang))]


def _kv_token_bytes(model: Path) -> int:
    """Of keys and values of a token, in bfloat16, in all layers."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return int(config["num_hidden_layers"] * 2 * kv_heads * head_dim * 2)


class System(Protocol):
    """What can be started and compared."""

    @property
    def name(self) -> str:
        """Its name on the command line and in what is kept."""
        ...

    @property
    def title(self) -> str:
        """Its name in tables."""
        ...

    @property
    def bears_stopping(self) -> bool:
        """Whether nothing in it takes a SIGSTOP of all of it for a failure."""
        ...

    def commands(self, setup: Setup) -> list[Command]:
        """Its servers. Clients talk to the last one; if there are two, to the first one before."""
        ...


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        Kvrelay("adaptive", ("--placement", "adaptive"), "kvrelay 1P1D, adaptive"),
        Kvrelay("disaggregated", ("--placement", "disaggregated"), "kvrelay 1P1D, disaggregated"),
        Kvrelay("aggregated", ("--aggregated", "1"), "kvrelay aggregated, one worker"),
        Kvrelay("aggregated-2", ("--aggregated", "2"), "kvrelay aggregated, two workers"),
        Vllm("vllm", "vLLM aggregated"),
        Vllm("vllm-1p1d", "vLLM 1P1D over NIXL", pair=True),
        Sglang("sglang", "SGLang"),
    )
}


@contextmanager
def started(system: System, setup: Setup) -> Iterator[Serving]:
    """Run the system until it is ready, yield where it is, and stop it afterwards.

    Raises ``StartError`` if it does not get ready.
    """
    setup.logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as running:
        commands = system.commands(setup)
        logs = [running.enter_context(_process(command, setup.logs)) for command in commands]
        for command, (process, log) in zip(commands, logs, strict=True):
            _await_ready(command, process, log)
        urls = [command.base_url for command in commands]
        processes = tuple(process for process, _ in logs)
        yield Serving(urls[-1], urls[0] if len(urls) > 1 else None, processes)


class Servers:
    """The systems while they are compared, one of which runs at a time.

    A system that takes long to start is stopped by SIGSTOP between its turns, if it
    bears that. The others are started anew for every turn.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._stopped: dict[str, Serving] = {}
        self._running = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    @contextmanager
    def turn(self, system: System) -> Iterator[Serving]:
        """Let the system run. Raises ``StartError`` if it does not get ready."""
        if not system.bears_stopping:
            with started(system, self._setup) as serving:
                yield serving
            return
        if serving_again := self._stopped.get(system.name):
            serving_again.signal(signal.SIGCONT)
        else:
            serving_again = self._running.enter_context(started(system, self._setup))
            self._stopped[system.name] = serving_again
        try:
            yield serving_again
        finally:
            serving_again.signal(signal.SIGSTOP)


@contextmanager
def _process(command: Command, logs: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run one server in a session of its own; its output goes to a file."""
    log = logs / f"{command.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 (our own command)
            command.arguments,
            env={**os.environ, **command.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, log
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:
        # What the server left in its session, or all of it if it did not end.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_ready(command: Command, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not (command.ready_line in _text(log) and _answers(command.base_url)):
        if process.poll() is not None or time.monotonic() > deadline:
            end = _text(log)[-_LOG_END_BYTES:]
            raise StartError(f"{command.name} did not get ready; {log} ends with:\n{end}")
        time.sleep(0.3)


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _answers(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/v1/models", timeout=5):  # noqa: S310 (http)
            return True
    except OSError:
        return False


def free_port() -> int:
    """A port of the loopback interface that nobody listens on.

    It is none of those that the system gives to connections, which might take it before the
    server that it is for has started.
    """
    for _ in range(_PORT_TRIES):
        port = random.randrange(*_PORTS)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise StartError(f"no free port among {_PORTS[0]} to {_PORTS[1] - 1} in {_PORT_TRIES} tries")
