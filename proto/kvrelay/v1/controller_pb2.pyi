from kvrelay.v1 import hand_over_pb2 as _hand_over_pb2
from kvrelay.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("name", "epoch", "leads", "changing", "pid", "uptime_seconds", "workers", "roll", "version", "successor", "routers", "routers_shifted")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    CHANGING_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROLL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_SHIFTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    leads: bool
    changing: bool
    pid: int
    uptime_seconds: float
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    roll: RollState
    version: str
    successor: str
    routers: int
    routers_shifted: int
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., leads: bool = ..., changing: bool = ..., pid: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., roll: _Optional[_Union[RollState, _Mapping]] = ..., version: _Optional[str] = ..., successor: _Optional[str] = ..., routers: _Optional[int] = ..., routers_shifted: _Optional[int] = ...) -> None: ...

class RollState(_message.Message):
    __slots__ = ("revision", "options", "replaced", "workers", "failed")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REVISION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    revision: int
    options: _containers.ScalarMap[str, str]
    replaced: int
    workers: int
    failed: str
    def __init__(self, revision: _Optional[int] = ..., options: _Optional[_Mapping[str, str]] = ..., replaced: _Optional[int] = ..., workers: _Optional[int] = ..., failed: _Optional[str] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("name", "role", "phase", "incarnation", "address", "node", "pid", "removing", "revision", "model", "last_end")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[WorkerState.Phase]
        PHASE_STARTING: _ClassVar[WorkerState.Phase]
        PHASE_LIVE: _ClassVar[WorkerState.Phase]
        PHASE_DRAINING: _ClassVar[WorkerState.Phase]
        PHASE_LOST: _ClassVar[WorkerState.Phase]
    PHASE_UNSPECIFIED: WorkerState.Phase
    PHASE_STARTING: WorkerState.Phase
    PHASE_LIVE: WorkerState.Phase
    PHASE_DRAINING: WorkerState.Phase
    PHASE_LOST: WorkerState.Phase
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    REMOVING_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAST_END_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: _inference_pb2.WorkerRole
    phase: WorkerState.Phase
    incarnation: str
    address: str
    node: str
    pid: int
    removing: bool
    revision: int
    model: str
    last_end: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[_inference_pb2.WorkerRole, str]] = ..., phase: _Optional[_Union[WorkerState.Phase, str]] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., removing: bool = ..., revision: _Optional[int] = ..., model: _Optional[str] = ..., last_end: _Optional[str] = ...) -> None: ...

class WatchWorkersRequest(_message.Message):
    __slots__ = ("metrics_address", "shifted_to")
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHIFTED_TO_FIELD_NUMBER: _ClassVar[int]
    metrics_address: str
    shifted_to: str
    def __init__(self, metrics_address: _Optional[str] = ..., shifted_to: _Optional[str] = ...) -> None: ...

class WatchWorkersResponse(_message.Message):
    __slots__ = ("endpoints", "awaited", "successor")
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    awaited: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    successor: str
    def __init__(self, endpoints: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., awaited: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., successor: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("name", "role", "incarnation", "address", "metrics_address", "pool_tokens", "max_model_len", "vocab_size", "architecture", "eos_token_ids", "model", "kv_events_address", "pid", "draining", "version", "locality")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCALITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: _inference_pb2.WorkerRole
    incarnation: str
    address: str
    metrics_address: str
    pool_tokens: int
    max_model_len: int
    vocab_size: int
    architecture: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    model: _hand_over_pb2.ModelDigest
    kv_events_address: str
    pid: int
    draining: bool
    version: str
    locality: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[_inference_pb2.WorkerRole, str]] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., pool_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., architecture: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., model: _Optional[_Union[_hand_over_pb2.ModelDigest, _Mapping]] = ..., kv_events_address: _Optional[str] = ..., pid: _Optional[int] = ..., draining: bool = ..., version: _Optional[str] = ..., locality: _Optional[str] = ...) -> None: ...
