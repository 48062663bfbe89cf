from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_AGGREGATED: _ClassVar[WorkerRole]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_AGGREGATED: WorkerRole

class OpenSessionRequest(_message.Message):
    __slots__ = ("session_id", "idle_timeout_seconds", "max_kept_tokens", "cache_salt", "history", "history_digest")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    HISTORY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    idle_timeout_seconds: float
    max_kept_tokens: int
    cache_salt: str
    history: TokenIds
    history_digest: str
    def __init__(self, session_id: _Optional[str] = ..., idle_timeout_seconds: _Optional[float] = ..., max_kept_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ..., history: _Optional[_Union[TokenIds, _Mapping]] = ..., history_digest: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "idle_timeout_seconds", "tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    idle_timeout_seconds: float
    tokens: int
    def __init__(self, session_id: _Optional[str] = ..., idle_timeout_seconds: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionState]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionState, _Mapping]]] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("session_id", "tokens", "turns", "running", "waiting_turns", "idle_seconds", "idle_timeout_seconds", "worker", "kept_tokens", "history_digest")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TURNS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tokens: int
    turns: int
    running: bool
    waiting_turns: int
    idle_seconds: float
    idle_timeout_seconds: float
    worker: str
    kept_tokens: int
    history_digest: str
    def __init__(self, session_id: _Optional[str] = ..., tokens: _Optional[int] = ..., turns: _Optional[int] = ..., running: bool = ..., waiting_turns: _Optional[int] = ..., idle_seconds: _Optional[float] = ..., idle_timeout_seconds: _Optional[float] = ..., worker: _Optional[str] = ..., kept_tokens: _Optional[int] = ..., history_digest: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "input_ids", "sampling_params", "priority", "model", "cache_salt", "session_id", "rewind_to", "queue_turn", "retain_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REWIND_TO_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TURN_FIELD_NUMBER: _ClassVar[int]
    RETAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    input_ids: TokenIds
    sampling_params: SamplingParams
    priority: int
    model: str
    cache_salt: str
    session_id: str
    rewind_to: int
    queue_turn: bool
    retain_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., input_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., model: _Optional[str] = ..., cache_salt: _Optional[str] = ..., session_id: _Optional[str] = ..., rewind_to: _Optional[int] = ..., queue_turn: bool = ..., retain_seconds: _Optional[float] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "logprobs", "logit_bias", "n", "prompt_logprobs", "speculate", "structured_output", "reasoning", "thinking_token_budget", "stop_in_reasoning", "allowed_token_ids", "banned_sequences", "bad_words", "include_stop_str_in_output")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    STOP_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    n: int
    prompt_logprobs: int
    speculate: bool
    structured_output: StructuredOutput
    reasoning: Reasoning
    thinking_token_budget: int
    stop_in_reasoning: bool
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_sequences: _containers.RepeatedCompositeFieldContainer[TokenIds]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., skip_special_tokens: bool = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., n: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., speculate: bool = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., reasoning: _Optional[_Union[Reasoning, _Mapping]] = ..., thinking_token_budget: _Optional[int] = ..., stop_in_reasoning: bool = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., banned_sequences: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., bad_words: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: bool = ...) -> None: ...

class Reasoning(_message.Message):
    __slots__ = ("begun", "begins", "ends", "ends_before", "forced_end")
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    ENDS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    FORCED_END_FIELD_NUMBER: _ClassVar[int]
    begun: bool
    begins: _containers.RepeatedScalarFieldContainer[str]
    ends: _containers.RepeatedScalarFieldContainer[str]
    ends_before: _containers.RepeatedScalarFieldContainer[str]
    forced_end: str
    def __init__(self, begun: bool = ..., begins: _Optional[_Iterable[str]] = ..., ends: _Optional[_Iterable[str]] = ..., ends_before: _Optional[_Iterable[str]] = ..., forced_end: _Optional[str] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "choice", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choice: _containers.RepeatedScalarFieldContainer[str]
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Iterable[str]] = ..., grammar: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "delta", "complete")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    delta: GenerateDelta
    complete: GenerateComplete
    def __init__(self, request_id: _Optional[str] = ..., delta: _Optional[_Union[GenerateDelta, _Mapping]] = ..., complete: _Optional[_Union[GenerateComplete, _Mapping]] = ...) -> None: ...

class GenerateDelta(_message.Message):
    __slots__ = ("index", "token_ids", "text", "logprobs", "choice", "prompt_logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    choice: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., choice: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "top", "rank")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    rank: int
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., rank: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class GenerateComplete(_message.Message):
    __slots__ = ("finish_reason", "matched_token_id", "matched_stop_string", "usage", "timings", "seed", "choices", "history_digest")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    HISTORY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    matched_token_id: int
    matched_stop_string: str
    usage: Usage
    timings: PhaseTimings
    seed: int
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceEnd]
    history_digest: str
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., matched_token_id: _Optional[int] = ..., matched_stop_string: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[PhaseTimings, _Mapping]] = ..., seed: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[ChoiceEnd, _Mapping]]] = ..., history_digest: _Optional[str] = ...) -> None: ...

class ChoiceEnd(_message.Message):
    __slots__ = ("finish_reason", "matched_token_id", "matched_stop_string")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    matched_token_id: int
    matched_stop_string: str
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., matched_token_id: _Optional[int] = ..., matched_stop_string: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PhaseTimings(_message.Message):
    __slots__ = ("queue_seconds", "prefill_seconds", "transfer_seconds", "decode_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    decode_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., transfer_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: bool = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "add_special_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    add_special_tokens: bool
    def __init__(self, text: _Optional[str] = ..., add_special_tokens: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("input_ids",)
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, input_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("input_ids", "skip_special_tokens")
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, input_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "architecture", "vocab_size", "max_model_len", "dtype", "eos_token_ids", "default_sampling_params")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling_params: SamplingParams
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., dtype: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "uptime_seconds", "live_requests", "workers", "model_digest", "requests")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_seconds: float
    live_requests: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    model_digest: str
    requests: RequestCounts
    def __init__(self, version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., live_requests: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., model_digest: _Optional[str] = ..., requests: _Optional[_Union[RequestCounts, _Mapping]] = ...) -> None: ...

class RequestCounts(_message.Message):
    __slots__ = ("waiting", "streaming", "waiting_for_workers", "ended", "resubmitted", "prompt_tokens", "output_tokens")
    class EndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STREAMING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    RESUBMITTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    streaming: int
    waiting_for_workers: int
    ended: _containers.ScalarMap[str, int]
    resubmitted: int
    prompt_tokens: int
    output_tokens: int
    def __init__(self, waiting: _Optional[int] = ..., streaming: _Optional[int] = ..., waiting_for_workers: _Optional[int] = ..., ended: _Optional[_Mapping[str, int]] = ..., resubmitted: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "role", "incarnation", "address", "metrics_address", "ready", "load", "draining", "model_digest", "refusal", "kv_events_address")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: WorkerRole
    incarnation: str
    address: str
    metrics_address: str
    ready: bool
    load: WorkerLoad
    draining: bool
    model_digest: str
    refusal: str
    kv_events_address: str
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., ready: bool = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., draining: bool = ..., model_digest: _Optional[str] = ..., refusal: _Optional[str] = ..., kv_events_address: _Optional[str] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("waiting_requests", "running_requests", "waiting_tokens", "pools", "growth_tokens", "draining", "peers", "speeds", "prompts_by_size", "reused_share", "output_tokens", "quarantine", "session_locked_tokens", "storage_error")
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    GROWTH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_BY_SIZE_FIELD_NUMBER: _ClassVar[int]
    REUSED_SHARE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    SESSION_LOCKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ERROR_FIELD_NUMBER: _ClassVar[int]
    waiting_requests: int
    running_requests: int
    waiting_tokens: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolState]
    growth_tokens: int
    draining: bool
    peers: _containers.RepeatedCompositeFieldContainer[PeerTransfer]
    speeds: StepSpeeds
    prompts_by_size: _containers.RepeatedScalarFieldContainer[int]
    reused_share: float
    output_tokens: int
    quarantine: _containers.RepeatedCompositeFieldContainer[QuarantineState]
    session_locked_tokens: int
    storage_error: str
    def __init__(self, waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolState, _Mapping]]] = ..., growth_tokens: _Optional[int] = ..., draining: bool = ..., peers: _Optional[_Iterable[_Union[PeerTransfer, _Mapping]]] = ..., speeds: _Optional[_Union[StepSpeeds, _Mapping]] = ..., prompts_by_size: _Optional[_Iterable[int]] = ..., reused_share: _Optional[float] = ..., output_tokens: _Optional[int] = ..., quarantine: _Optional[_Iterable[_Union[QuarantineState, _Mapping]]] = ..., session_locked_tokens: _Optional[int] = ..., storage_error: _Optional[str] = ...) -> None: ...

class QuarantineState(_message.Message):
    __slots__ = ("reason", "pages", "seconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    pages: int
    seconds: int
    def __init__(self, reason: _Optional[str] = ..., pages: _Optional[int] = ..., seconds: _Optional[int] = ...) -> None: ...

class StepSpeeds(_message.Message):
    __slots__ = ("seconds_per_step", "seconds_per_token", "seconds_per_pair", "seconds_per_row", "seconds_per_row_pair", "chunk_tokens", "prompts_known", "rows_known")
    SECONDS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_PAIR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_ROW_PAIR_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    ROWS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    seconds_per_step: float
    seconds_per_token: float
    seconds_per_pair: float
    seconds_per_row: float
    seconds_per_row_pair: float
    chunk_tokens: int
    prompts_known: bool
    rows_known: bool
    def __init__(self, seconds_per_step: _Optional[float] = ..., seconds_per_token: _Optional[float] = ..., seconds_per_pair: _Optional[float] = ..., seconds_per_row: _Optional[float] = ..., seconds_per_row_pair: _Optional[float] = ..., chunk_tokens: _Optional[int] = ..., prompts_known: bool = ..., rows_known: bool = ...) -> None: ...

class PeerTransfer(_message.Message):
    __slots__ = ("incarnation", "backend", "transports", "refusal", "read_bytes_per_second", "write_bytes_per_second", "lent_tokens_per_second", "host_bytes_per_second", "host_refusal")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LENT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    HOST_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    backend: str
    transports: str
    refusal: str
    read_bytes_per_second: float
    write_bytes_per_second: float
    lent_tokens_per_second: float
    host_bytes_per_second: float
    host_refusal: str
    def __init__(self, incarnation: _Optional[str] = ..., backend: _Optional[str] = ..., transports: _Optional[str] = ..., refusal: _Optional[str] = ..., read_bytes_per_second: _Optional[float] = ..., write_bytes_per_second: _Optional[float] = ..., lent_tokens_per_second: _Optional[float] = ..., host_bytes_per_second: _Optional[float] = ..., host_refusal: _Optional[str] = ...) -> None: ...

class PoolState(_message.Message):
    __slots__ = ("pool", "page_size", "total", "free", "held", "cached_evictable", "cached_protected", "session", "quarantined", "promised", "in_flight")
    POOL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CACHED_EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROTECTED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    page_size: int
    total: int
    free: int
    held: int
    cached_evictable: int
    cached_protected: int
    session: int
    quarantined: int
    promised: int
    in_flight: int
    def __init__(self, pool: _Optional[str] = ..., page_size: _Optional[int] = ..., total: _Optional[int] = ..., free: _Optional[int] = ..., held: _Optional[int] = ..., cached_evictable: _Optional[int] = ..., cached_protected: _Optional[int] = ..., session: _Optional[int] = ..., quarantined: _Optional[int] = ..., promised: _Optional[int] = ..., in_flight: _Optional[int] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...
