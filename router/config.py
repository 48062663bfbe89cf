"""Options and configuration of a router."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvrelay.net.door_rules import HTTP_IDLE_SECONDS
from kvrelay.net.tls import TlsFiles
from kvrelay.options.declaration import Section, option
from kvrelay.options.observing import ObservingOptions
from kvrelay.pacing.chunk_size import NO_TARGETS, LatencyTargets


class ToolParser(StrEnum):
    """The parser that finds calls of tools in a chat's output.

    Beside the first two, these are the names of `TOOL_FORMATS`.
    """

    AUTO = "auto"
    """The form that the chat template tells the model to use."""
    NONE = "none"
    """No parser: calls stay in the content."""
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    DEEPSEEK_V32 = "deepseek_v32"
    DEEPSEEK_V4 = "deepseek_v4"
    GLM45 = "glm45"
    GLM47 = "glm47"
    GRANITE = "granite"
    HERMES = "hermes"
    KIMI_K2 = "kimi_k2"
    LLAMA3_JSON = "llama3_json"
    LLAMA4_PYTHONIC = "llama4_pythonic"
    MINIMAX_M2 = "minimax_m2"
    MISTRAL = "mistral"
    MISTRAL_LIST = "mistral_list"
    NEMOTRON_JSON = "nemotron_json"
    OPENAI = "openai"
    PHI4_MINI_JSON = "phi4_mini_json"
    PYTHONIC = "pythonic"
    QWEN3_CODER = "qwen3_coder"


class ReasoningFormat(StrEnum):
    """The parser that finds reasoning in a chat's output."""

    AUTO = "auto"
    """Reasoning between tags, if the chat template has them."""
    NONE = "none"
    """No parser: reasoning stays in the content."""
    THINK = "think"
    """Reasoning between <think> and </think>."""
    DEEPSEEK_R1 = "deepseek_r1"
    DEEPSEEK_V3 = "deepseek_v3"
    GLM45 = "glm45"
    GRANITE = "granite"
    KIMI_K2 = "kimi_k2"
    MINIMAX_M2 = "minimax_m2"
    MISTRAL = "mistral"
    OPENAI_GPTOSS = "openai_gptoss"
    """Reasoning in the channel analysis of harmony."""
    QWEN3 = "qwen3"


class PlacementMode(StrEnum):
    """The workers that compute prompts, where there are prefill and decode workers."""

    ADAPTIVE = "adaptive"
    """A prefill worker, or the decode worker itself where the first token is expected sooner."""
    DISAGGREGATED = "disaggregated"
    """Prefill workers alone."""


class MetricNames(StrEnum):
    """The names under which the router exports its metrics."""

    KVRELAY = "kvrelay"
    """Only the router's own names."""
    VLLM = "vllm"
    """vLLM's names beside the router's own."""


@dataclass(frozen=True, kw_only=True)
class RouterOptions(ObservingOptions):
    """The options of `kvrelay serve` that the router gets unchanged."""

    placement: PlacementMode = option(
        PlacementMode.ADAPTIVE,
        "Who computes a prompt: adaptive lets a decode worker compute it where its first token is "
        "expected sooner, and where no prefill worker is ready; disaggregated lets prefill workers "
        "do it alone.",
        Section.WORKERS,
    )

    default_max_tokens: int | None = option(
        None,
        "The most output tokens of a request that does not set max_tokens. Unless this is given, a "
        "chat may use what its prompt leaves of the context.",
        Section.REQUESTS,
        at_least=1,
        shown_default="256, but not for chats",
    )
    max_live_requests: int = option(
        1024,
        "The router refuses requests above this many at the same time, with a hint to retry.",
        Section.REQUESTS,
        at_least=1,
    )
    max_message_bytes: int = option(
        16 << 20,
        "The router refuses a message from a client that has more bytes. It may have to hold 64 of "
        "twice as many at once, which arrive.",
        Section.REQUESTS,
        at_least=64 << 10,
        at_most=16 << 20,
    )
    max_text_bytes: int = option(
        64 << 20,
        "The router refuses prompts while those that it tokenizes, or that wait for it, have this "
        "many bytes together, with a hint to retry. Those of up to 64 KiB, up to 1 MiB and above "
        "count apart.",
        Section.REQUESTS,
        at_least=1,
    )
    max_grammar_bytes: int = option(
        512 << 20,
        "The router refuses requests with a structured output while the grammars of live requests "
        "take this many bytes together, with a hint to retry. Equal ones count once, and each as "
        "what it took to compile, at least 64 KiB.",
        Section.REQUESTS,
        at_least=64 << 10,
    )
    max_unread_bytes: int = option(
        8 << 20,
        "The router ends the stream of a client for which more bytes than this wait, because it "
        "reads too slowly. An HTTP answer that is not streamed has no more for each prompt. A live "
        "request keeps no more of what its readers have read; after that, a call with its id "
        "cannot join it.",
        Section.REQUESTS,
        at_least=1,
    )
    read_timeout: float = option(
        60.0,
        "The router ends the stream of a client that takes nothing of what waits for it for this "
        "many seconds.",
        Section.REQUESTS,
        at_least=0.001,
        unit="seconds",
    )
    deadline_margin: float = option(
        2.0,
        "The router refuses a request at once if its first token is expected only after so many "
        "times what its deadline leaves, by the workers' queues and measured speeds. 0: it "
        "refuses none for that.",
        Section.REQUESTS,
        at_least=0,
    )
    auth_token_file: Path | None = option(
        None,
        "A file with the tokens that clients must send, with every call except health checks, and "
        "with what each may do: TOML, or one token a line. docs/security.md describes it.",
        Section.ACCESS,
    )
    metric_names: MetricNames = option(
        MetricNames.KVRELAY,
        "vllm: the router exports its metrics under vLLM's names, too, such as "
        "vllm:num_requests_waiting, which gateways and autoscalers look for.",
        Section.ACCESS,
    )
    chat_template: Path | None = option(
        None,
        "A Jinja file that makes a prompt of a conversation, in place of the model's own template.",
        Section.MODEL,
    )
    tool_call_parser: ToolParser = option(
        ToolParser.AUTO,
        "How calls of tools are found in a chat's output: auto takes the form that the chat "
        "template tells the model to use, none leaves them in the content.",
        Section.MODEL,
    )
    reasoning_parser: ReasoningFormat = option(
        ReasoningFormat.AUTO,
        "How reasoning is found in a chat's output: auto looks for the tags that the chat template "
        "has, none leaves it in the content.",
        Section.MODEL,
    )
    http_origins: str = option(
        "",
        "Origins of web pages that may call --http, such as https://chat.example, separated by "
        "commas; * for all. Pages of other origins are refused.",
        Section.ACCESS,
        metavar="ORIGINS",
        shown_default="none",
    )
    http_keep_alive: float = option(
        HTTP_IDLE_SECONDS,
        "The router closes a connection of --http that is idle between two calls for this long. A "
        "proxy that keeps connections, mostly for 60 s, must close them first, or a call may meet "
        "the end of its connection.",
        Section.ACCESS,
        at_least=1,
        unit="seconds",
    )
    sse_keepalive: float = option(
        10.0,
        "The router writes a comment into a stream of --http in which nothing has come for so many "
        "seconds. Until the first one an error has a status of its own. 0: it writes none.",
        Section.ACCESS,
        at_least=0,
        unit="seconds",
    )
    drain_seconds: float = option(
        300.0,
        "At SIGTERM a router is ready no more, and goes on for at most so many seconds, as long as "
        "requests live. Ctrl-C, or a second signal, does not wait.",
        Section.RECOVERY,
        at_least=0,
        unit="seconds",
    )
    max_attempts: int = option(
        3,
        "A request fails when one of its outputs has failed this often, because a worker was lost, "
        "say, without a new token in between.",
        Section.RECOVERY,
        at_least=1,
    )
    failover_wait: float = option(
        60.0,
        "Seconds that a request whose worker was lost waits for another one to go on with.",
        Section.RECOVERY,
        at_least=0,
        unit="seconds",
    )
    worker_wait: float = option(
        300.0,
        "The most seconds that a new request waits while no worker can take it and one is being "
        "replaced: as long as a start may take.",
        Section.RECOVERY,
        at_least=0,
        unit="seconds",
    )
    max_waiting_for_workers: int = option(
        256,
        "The most new requests that wait so at the same time; the router refuses others, with a "
        "hint to retry.",
        Section.RECOVERY,
        at_least=0,
    )
    prefix_index_entries: int = option(
        1 << 18,
        "The router remembers which workers have which cached prefixes: at most so many entries, "
        "each for 64 tokens (or for a page, if that is larger) on one worker. All workers share "
        "them: give more for many workers or much KV. 0: it places requests by load alone.",
        Section.REQUESTS,
        at_least=0,
    )
    session_timeout: float = option(
        600.0,
        "Seconds without a turn after which a session expires, unless it asks for less.",
        Section.REQUESTS,
        at_least=0.001,
        unit="seconds",
    )
    max_sessions: int = option(
        10_000,
        "The router refuses to open sessions above this many, with a hint to retry.",
        Section.REQUESTS,
        at_least=0,
    )
    max_session_tokens: int = option(
        16 << 20,
        "The router refuses new sessions and turns while the histories of all sessions have this "
        "many tokens, of 4 bytes each.",
        Section.REQUESTS,
        at_least=1,
    )
    max_session_share: float = option(
        0.5,
        "One token's sessions take at most this part of --max-sessions, and their histories of "
        "--max-session-tokens. Without tokens it bounds nobody.",
        Section.REQUESTS,
        at_least=0,
        at_most=1,
    )
    seed_key_file: Path | None = option(
        None,
        "A file with a secret of 16 bytes or more, the same for all routers of a cluster. By it "
        "the seed of a request that sets none follows from its id and its token, so that a client "
        "which tries again on another router gets the same tokens. Without it each router makes a "
        "secret of its own.",
        Section.RECOVERY,
    )
    strict: bool = option(
        False,
        "Fail a request that would have to be computed again because its worker or its KV was "
        "lost, and say why. Requests that are retracted go on as usual.",
        Section.RECOVERY,
    )

    log_prompts: bool = option(
        False,
        "The router logs each request's prompt and output when it ends. Without it no log has "
        "either. Whoever reads the log then reads what all clients write.",
        Section.OBSERVING,
    )
    trace_sample: float = option(
        0.01,
        "The share of requests that are traced with --otlp, from 0 to 1. A request whose caller "
        "has sent a traceparent is traced if that says so, and not otherwise.",
        Section.OBSERVING,
        at_least=0,
        at_most=1,
    )


@dataclass(frozen=True)
class RouterConfig(RouterOptions):
    """The whole configuration of one router. Built once, by `deploy`."""

    model_name: str
    """The model's first name for clients, which is that of its metrics."""
    model_path: Path
    """The checkpoint folder; its tokenizer.json is read."""
    dtype: str
    """The workers' dtype, reported by GetModelInfo."""
    grpc_address: str
    """The address where clients connect; port 0: any free one."""
    metrics_address: str
    """The address where Prometheus reads; port 0: any free one."""
    http_address: str | None = None
    """The address where clients of OpenAI's API connect; port 0: any free one. None: nowhere."""
    admin_address: str = "127.0.0.1:0"
    """The address where operators connect, if the router has an administrator."""
    latency_targets: LatencyTargets = NO_TARGETS
    """The latencies that workers keep, by which a decode worker gets prompts."""
    retry_after_ms: int = 500
    """The time after which a refused client should try again."""
    shutdown_grace_seconds: float = 5.0
    """The time for which `stop` lets live requests go on before it ends them."""
    worker_tls: TlsFiles | None = None
    """The certificate for workers, who must show one of the same authority; None: plain text."""
    front_tls: TlsFiles | None = None
    """The certificate for clients, who need to show none; None: plain text."""
    admin_tls: TlsFiles | None = None
    """The certificate for operators, who need to show none; None: plain text."""
    model_aliases: tuple[str, ...] = ()
    """The other names of the model; an answer has the one that was asked for."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model, first the one for clients that ask for none."""
        return (self.model_name, *self.model_aliases)
