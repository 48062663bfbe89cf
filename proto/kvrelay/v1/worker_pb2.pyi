from kvrelay.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FindHistoryRequest(_message.Message):
    __slots__ = ("owner", "digest")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    owner: str
    digest: str
    def __init__(self, owner: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class FindHistoryResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetPageOwnersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPageOwnersResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolOwners]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolOwners, _Mapping]]] = ...) -> None: ...

class PoolOwners(_message.Message):
    __slots__ = ("pool", "runs")
    POOL_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    runs: _containers.RepeatedCompositeFieldContainer[OwnedPages]
    def __init__(self, pool: _Optional[str] = ..., runs: _Optional[_Iterable[_Union[OwnedPages, _Mapping]]] = ...) -> None: ...

class OwnedPages(_message.Message):
    __slots__ = ("first_page", "num_pages", "owner", "holder")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    num_pages: int
    owner: str
    holder: str
    def __init__(self, first_page: _Optional[int] = ..., num_pages: _Optional[int] = ..., owner: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "tell_prefixes", "forget_session", "watch_requests")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    TELL_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    FORGET_SESSION_FIELD_NUMBER: _ClassVar[int]
    WATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    hello: AttachHello
    submit: SubmitRequest
    cancel: CancelRequest
    tell_prefixes: TellPrefixesRequest
    forget_session: ForgetSessionRequest
    watch_requests: WatchRequests
    def __init__(self, hello: _Optional[_Union[AttachHello, _Mapping]] = ..., submit: _Optional[_Union[SubmitRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., tell_prefixes: _Optional[_Union[TellPrefixesRequest, _Mapping]] = ..., forget_session: _Optional[_Union[ForgetSessionRequest, _Mapping]] = ..., watch_requests: _Optional[_Union[WatchRequests, _Mapping]] = ...) -> None: ...

class AttachHello(_message.Message):
    __slots__ = ("router", "incarnation", "version")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    router: str
    incarnation: str
    version: str
    def __init__(self, router: _Optional[str] = ..., incarnation: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "input_ids", "sampling_params", "priority", "prefill", "num_prompt_tokens", "first_choice", "age_seconds", "namespace", "alone", "cached_tokens", "session", "traceparent", "open_ended", "retain_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    OPEN_ENDED_FIELD_NUMBER: _ClassVar[int]
    RETAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _inference_pb2.SamplingParams
    priority: int
    prefill: PeerWorker
    num_prompt_tokens: int
    first_choice: int
    age_seconds: float
    namespace: str
    alone: bool
    cached_tokens: int
    session: KeptSession
    traceparent: str
    open_ended: bool
    retain_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., input_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., prefill: _Optional[_Union[PeerWorker, _Mapping]] = ..., num_prompt_tokens: _Optional[int] = ..., first_choice: _Optional[int] = ..., age_seconds: _Optional[float] = ..., namespace: _Optional[str] = ..., alone: bool = ..., cached_tokens: _Optional[int] = ..., session: _Optional[_Union[KeptSession, _Mapping]] = ..., traceparent: _Optional[str] = ..., open_ended: bool = ..., retain_seconds: _Optional[float] = ...) -> None: ...

class KeptSession(_message.Message):
    __slots__ = ("session", "most_kept_tokens", "owner")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MOST_KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    session: str
    most_kept_tokens: int
    owner: str
    def __init__(self, session: _Optional[str] = ..., most_kept_tokens: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class ForgetSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class PeerWorker(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class WatchRequests(_message.Message):
    __slots__ = ("on",)
    ON_FIELD_NUMBER: _ClassVar[int]
    on: bool
    def __init__(self, on: bool = ...) -> None: ...

class TellPrefixesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("outputs", "load", "prefixes", "peers", "gone_peers", "next_tokens", "ended_sessions", "progress")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    GONE_PEERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[RequestOutput]
    load: _inference_pb2.WorkerLoad
    prefixes: PrefixUpdate
    peers: _containers.RepeatedCompositeFieldContainer[_inference_pb2.PeerTransfer]
    gone_peers: _containers.RepeatedScalarFieldContainer[str]
    next_tokens: NextTokens
    ended_sessions: _containers.RepeatedScalarFieldContainer[str]
    progress: Progress
    def __init__(self, outputs: _Optional[_Iterable[_Union[RequestOutput, _Mapping]]] = ..., load: _Optional[_Union[_inference_pb2.WorkerLoad, _Mapping]] = ..., prefixes: _Optional[_Union[PrefixUpdate, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[_inference_pb2.PeerTransfer, _Mapping]]] = ..., gone_peers: _Optional[_Iterable[str]] = ..., next_tokens: _Optional[_Union[NextTokens, _Mapping]] = ..., ended_sessions: _Optional[_Iterable[str]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestProgress]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestProgress, _Mapping]]] = ...) -> None: ...

class RequestProgress(_message.Message):
    __slots__ = ("attempt", "phase", "pages", "written_pages", "announced_pages", "pulled_pages", "owned_pages", "output_tokens")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[RequestProgress.Phase]
        PHASE_QUEUED: _ClassVar[RequestProgress.Phase]
        PHASE_ASKED: _ClassVar[RequestProgress.Phase]
        PHASE_GRANTED: _ClassVar[RequestProgress.Phase]
        PHASE_COMPUTING: _ClassVar[RequestProgress.Phase]
        PHASE_ANNOUNCED: _ClassVar[RequestProgress.Phase]
        PHASE_READING: _ClassVar[RequestProgress.Phase]
        PHASE_DECODING: _ClassVar[RequestProgress.Phase]
    PHASE_UNSPECIFIED: RequestProgress.Phase
    PHASE_QUEUED: RequestProgress.Phase
    PHASE_ASKED: RequestProgress.Phase
    PHASE_GRANTED: RequestProgress.Phase
    PHASE_COMPUTING: RequestProgress.Phase
    PHASE_ANNOUNCED: RequestProgress.Phase
    PHASE_READING: RequestProgress.Phase
    PHASE_DECODING: RequestProgress.Phase
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_PAGES_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PULLED_PAGES_FIELD_NUMBER: _ClassVar[int]
    OWNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    phase: RequestProgress.Phase
    pages: int
    written_pages: int
    announced_pages: int
    pulled_pages: int
    owned_pages: int
    output_tokens: int
    def __init__(self, attempt: _Optional[int] = ..., phase: _Optional[_Union[RequestProgress.Phase, str]] = ..., pages: _Optional[int] = ..., written_pages: _Optional[int] = ..., announced_pages: _Optional[int] = ..., pulled_pages: _Optional[int] = ..., owned_pages: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class NextTokens(_message.Message):
    __slots__ = ("attempts", "choices", "indexes", "token_ids")
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempts: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefixUpdate(_message.Message):
    __slots__ = ("number", "page_size", "begins", "stored", "removed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    number: int
    page_size: int
    begins: bool
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., page_size: _Optional[int] = ..., begins: bool = ..., stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("request_id", "attempt", "index", "token_ids", "logprobs", "end", "timings", "cached_tokens", "choice", "prompt_logprobs", "prompt_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    end: RequestEnd
    timings: _inference_pb2.PhaseTimings
    cached_tokens: int
    choice: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    prompt_index: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., end: _Optional[_Union[RequestEnd, _Mapping]] = ..., timings: _Optional[_Union[_inference_pb2.PhaseTimings, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., choice: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_index: _Optional[int] = ...) -> None: ...

class RequestEnd(_message.Message):
    __slots__ = ("reason", "matched_token_id", "matched_stop_string", "error", "cause")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[RequestEnd.Reason]
        REASON_STOP: _ClassVar[RequestEnd.Reason]
        REASON_LENGTH: _ClassVar[RequestEnd.Reason]
        REASON_ABORTED: _ClassVar[RequestEnd.Reason]
        REASON_HANDED_OVER: _ClassVar[RequestEnd.Reason]
        REASON_FAILED: _ClassVar[RequestEnd.Reason]
        REASON_RETRACTED: _ClassVar[RequestEnd.Reason]
    REASON_UNSPECIFIED: RequestEnd.Reason
    REASON_STOP: RequestEnd.Reason
    REASON_LENGTH: RequestEnd.Reason
    REASON_ABORTED: RequestEnd.Reason
    REASON_HANDED_OVER: RequestEnd.Reason
    REASON_FAILED: RequestEnd.Reason
    REASON_RETRACTED: RequestEnd.Reason
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[RequestEnd.Cause]
        CAUSE_PEER_LOST: _ClassVar[RequestEnd.Cause]
        CAUSE_PEER_FAILED: _ClassVar[RequestEnd.Cause]
        CAUSE_READ_FAILED: _ClassVar[RequestEnd.Cause]
        CAUSE_PAGE_MISMATCH: _ClassVar[RequestEnd.Cause]
        CAUSE_TRANSFER_REFUSED: _ClassVar[RequestEnd.Cause]
        CAUSE_PROTOCOL_ERROR: _ClassVar[RequestEnd.Cause]
        CAUSE_WORKER_LOST: _ClassVar[RequestEnd.Cause]
        CAUSE_ABORTED: _ClassVar[RequestEnd.Cause]
        CAUSE_FAILED: _ClassVar[RequestEnd.Cause]
        CAUSE_FORWARD_FAILED: _ClassVar[RequestEnd.Cause]
        CAUSE_FORWARD_FAILED_ALONE: _ClassVar[RequestEnd.Cause]
        CAUSE_GRAMMAR_FAILED: _ClassVar[RequestEnd.Cause]
    CAUSE_UNSPECIFIED: RequestEnd.Cause
    CAUSE_PEER_LOST: RequestEnd.Cause
    CAUSE_PEER_FAILED: RequestEnd.Cause
    CAUSE_READ_FAILED: RequestEnd.Cause
    CAUSE_PAGE_MISMATCH: RequestEnd.Cause
    CAUSE_TRANSFER_REFUSED: RequestEnd.Cause
    CAUSE_PROTOCOL_ERROR: RequestEnd.Cause
    CAUSE_WORKER_LOST: RequestEnd.Cause
    CAUSE_ABORTED: RequestEnd.Cause
    CAUSE_FAILED: RequestEnd.Cause
    CAUSE_FORWARD_FAILED: RequestEnd.Cause
    CAUSE_FORWARD_FAILED_ALONE: RequestEnd.Cause
    CAUSE_GRAMMAR_FAILED: RequestEnd.Cause
    REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    reason: RequestEnd.Reason
    matched_token_id: int
    matched_stop_string: str
    error: str
    cause: RequestEnd.Cause
    def __init__(self, reason: _Optional[_Union[RequestEnd.Reason, str]] = ..., matched_token_id: _Optional[int] = ..., matched_stop_string: _Optional[str] = ..., error: _Optional[str] = ..., cause: _Optional[_Union[RequestEnd.Cause, str]] = ...) -> None: ...
