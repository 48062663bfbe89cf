from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeAgentRequest(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class DescribeAgentResponse(_message.Message):
    __slots__ = ("incarnation", "agent_metadata", "agent_metadata_sha256", "device_id", "memory_type", "pools", "scratch", "model", "host_pools")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_SHA256_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TYPE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HOST_POOLS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    agent_metadata: bytes
    agent_metadata_sha256: bytes
    device_id: int
    memory_type: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolDescription]
    scratch: PoolDescription
    model: ModelDigest
    host_pools: _containers.RepeatedCompositeFieldContainer[PoolDescription]
    def __init__(self, incarnation: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ..., agent_metadata_sha256: _Optional[bytes] = ..., device_id: _Optional[int] = ..., memory_type: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolDescription, _Mapping]]] = ..., scratch: _Optional[_Union[PoolDescription, _Mapping]] = ..., model: _Optional[_Union[ModelDigest, _Mapping]] = ..., host_pools: _Optional[_Iterable[_Union[PoolDescription, _Mapping]]] = ...) -> None: ...

class ModelDigest(_message.Message):
    __slots__ = ("config", "weights", "tokenizer", "dtype", "layout", "draft", "arithmetic")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    config: str
    weights: str
    tokenizer: str
    dtype: str
    layout: str
    draft: str
    arithmetic: str
    def __init__(self, config: _Optional[str] = ..., weights: _Optional[str] = ..., tokenizer: _Optional[str] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ..., draft: _Optional[str] = ..., arithmetic: _Optional[str] = ...) -> None: ...

class PoolDescription(_message.Message):
    __slots__ = ("address", "pages", "geometry")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    address: int
    pages: int
    geometry: PoolGeometry
    def __init__(self, address: _Optional[int] = ..., pages: _Optional[int] = ..., geometry: _Optional[_Union[PoolGeometry, _Mapping]] = ...) -> None: ...

class PoolGeometry(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "dtype", "page_size", "order", "latent", "window", "draft")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LATENT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    order: str
    latent: bool
    window: int
    draft: bool
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., order: _Optional[str] = ..., latent: bool = ..., window: _Optional[int] = ..., draft: bool = ...) -> None: ...

class HandOverRequest(_message.Message):
    __slots__ = ("open", "grant", "done", "heartbeat", "held", "released", "number")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    open: HandOverOpen
    grant: HandOverGrant
    done: HandOverDone
    heartbeat: HandOverHeartbeat
    held: HandOverHeld
    released: HandOverReleased
    number: int
    def __init__(self, open: _Optional[_Union[HandOverOpen, _Mapping]] = ..., grant: _Optional[_Union[HandOverGrant, _Mapping]] = ..., done: _Optional[_Union[HandOverDone, _Mapping]] = ..., heartbeat: _Optional[_Union[HandOverHeartbeat, _Mapping]] = ..., held: _Optional[_Union[HandOverHeld, _Mapping]] = ..., released: _Optional[_Union[HandOverReleased, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class HandOverOpen(_message.Message):
    __slots__ = ("request_id", "attempt", "prefill_incarnation", "decode_incarnation", "router")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prefill_incarnation: str
    decode_incarnation: str
    router: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prefill_incarnation: _Optional[str] = ..., decode_incarnation: _Optional[str] = ..., router: _Optional[str] = ...) -> None: ...

class HandOverGrant(_message.Message):
    __slots__ = ("history", "reads_host")
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    READS_HOST_FIELD_NUMBER: _ClassVar[int]
    history: HandOverHistory
    reads_host: bool
    def __init__(self, history: _Optional[_Union[HandOverHistory, _Mapping]] = ..., reads_host: bool = ...) -> None: ...

class HandOverHistory(_message.Message):
    __slots__ = ("runs", "agent", "bytes_per_second")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    agent: DescribeAgentResponse
    bytes_per_second: float
    def __init__(self, runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ..., agent: _Optional[_Union[DescribeAgentResponse, _Mapping]] = ..., bytes_per_second: _Optional[float] = ...) -> None: ...

class HandOverHeld(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HandOverDone(_message.Message):
    __slots__ = ("sums",)
    SUMS_FIELD_NUMBER: _ClassVar[int]
    sums: _containers.RepeatedCompositeFieldContainer[PageSum]
    def __init__(self, sums: _Optional[_Iterable[_Union[PageSum, _Mapping]]] = ...) -> None: ...

class PageSum(_message.Message):
    __slots__ = ("pool", "page", "value")
    POOL_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    pool: int
    page: int
    value: int
    def __init__(self, pool: _Optional[int] = ..., page: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...

class HandOverHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HandOverResponse(_message.Message):
    __slots__ = ("ask", "announce", "released", "ended", "heartbeat", "begun", "done", "number")
    ASK_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ask: HandOverAsk
    announce: HandOverAnnounce
    released: HandOverReleased
    ended: HandOverEnded
    heartbeat: HandOverHeartbeat
    begun: HandOverBegun
    done: HandOverDone
    number: int
    def __init__(self, ask: _Optional[_Union[HandOverAsk, _Mapping]] = ..., announce: _Optional[_Union[HandOverAnnounce, _Mapping]] = ..., released: _Optional[_Union[HandOverReleased, _Mapping]] = ..., ended: _Optional[_Union[HandOverEnded, _Mapping]] = ..., heartbeat: _Optional[_Union[HandOverHeartbeat, _Mapping]] = ..., begun: _Optional[_Union[HandOverBegun, _Mapping]] = ..., done: _Optional[_Union[HandOverDone, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class HandOverAsk(_message.Message):
    __slots__ = ("known_tokens",)
    KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    known_tokens: int
    def __init__(self, known_tokens: _Optional[int] = ...) -> None: ...

class HandOverBegun(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HandOverAnnounce(_message.Message):
    __slots__ = ("runs", "first_tokens", "from_host")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FROM_HOST_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[PageRun]
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    from_host: bool
    def __init__(self, runs: _Optional[_Iterable[_Union[PageRun, _Mapping]]] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., from_host: bool = ...) -> None: ...

class PageRun(_message.Message):
    __slots__ = ("first_page", "page_ids")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_page: _Optional[int] = ..., page_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "finished")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    finished: bool
    def __init__(self, token_id: _Optional[int] = ..., finished: bool = ...) -> None: ...

class HandOverReleased(_message.Message):
    __slots__ = ("valid", "mismatches")
    VALID_FIELD_NUMBER: _ClassVar[int]
    MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    mismatches: int
    def __init__(self, valid: bool = ..., mismatches: _Optional[int] = ...) -> None: ...

class HandOverEnded(_message.Message):
    __slots__ = ("reason", "detail")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[HandOverEnded.Reason]
        REASON_FINISHED: _ClassVar[HandOverEnded.Reason]
        REASON_ABORTED: _ClassVar[HandOverEnded.Reason]
        REASON_FAILED: _ClassVar[HandOverEnded.Reason]
    REASON_UNSPECIFIED: HandOverEnded.Reason
    REASON_FINISHED: HandOverEnded.Reason
    REASON_ABORTED: HandOverEnded.Reason
    REASON_FAILED: HandOverEnded.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: HandOverEnded.Reason
    detail: str
    def __init__(self, reason: _Optional[_Union[HandOverEnded.Reason, str]] = ..., detail: _Optional[str] = ...) -> None: ...
