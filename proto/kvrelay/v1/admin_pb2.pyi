from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShiftRoutersRequest(_message.Message):
    __slots__ = ("successor",)
    SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
    successor: str
    def __init__(self, successor: _Optional[str] = ...) -> None: ...

class ShiftRoutersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollWorkersRequest(_message.Message):
    __slots__ = ("options", "max_surge", "max_unavailable", "undo")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SURGE_FIELD_NUMBER: _ClassVar[int]
    MAX_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    options: _containers.ScalarMap[str, str]
    max_surge: int
    max_unavailable: int
    undo: bool
    def __init__(self, options: _Optional[_Mapping[str, str]] = ..., max_surge: _Optional[int] = ..., max_unavailable: _Optional[int] = ..., undo: bool = ...) -> None: ...

class RollWorkersResponse(_message.Message):
    __slots__ = ("worker", "phase", "reason")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker: str
    phase: ScaleWorkersResponse.Phase
    reason: str
    def __init__(self, worker: _Optional[str] = ..., phase: _Optional[_Union[ScaleWorkersResponse.Phase, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ScaleWorkersRequest(_message.Message):
    __slots__ = ("prefill", "decode", "aggregated")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    AGGREGATED_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    aggregated: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., aggregated: _Optional[int] = ...) -> None: ...

class ScaleWorkersResponse(_message.Message):
    __slots__ = ("worker", "phase", "reason")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[ScaleWorkersResponse.Phase]
        PHASE_STARTING: _ClassVar[ScaleWorkersResponse.Phase]
        PHASE_READY: _ClassVar[ScaleWorkersResponse.Phase]
        PHASE_DRAINING: _ClassVar[ScaleWorkersResponse.Phase]
        PHASE_LEFT: _ClassVar[ScaleWorkersResponse.Phase]
        PHASE_FAILED: _ClassVar[ScaleWorkersResponse.Phase]
    PHASE_UNSPECIFIED: ScaleWorkersResponse.Phase
    PHASE_STARTING: ScaleWorkersResponse.Phase
    PHASE_READY: ScaleWorkersResponse.Phase
    PHASE_DRAINING: ScaleWorkersResponse.Phase
    PHASE_LEFT: ScaleWorkersResponse.Phase
    PHASE_FAILED: ScaleWorkersResponse.Phase
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker: str
    phase: ScaleWorkersResponse.Phase
    reason: str
    def __init__(self, worker: _Optional[str] = ..., phase: _Optional[_Union[ScaleWorkersResponse.Phase, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker", "remove")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    remove: bool
    def __init__(self, worker: _Optional[str] = ..., remove: bool = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("phase", "incarnation", "requests", "requests_unknown")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[DrainWorkerResponse.Phase]
        PHASE_DRAINING: _ClassVar[DrainWorkerResponse.Phase]
        PHASE_LEFT: _ClassVar[DrainWorkerResponse.Phase]
        PHASE_READY: _ClassVar[DrainWorkerResponse.Phase]
    PHASE_UNSPECIFIED: DrainWorkerResponse.Phase
    PHASE_DRAINING: DrainWorkerResponse.Phase
    PHASE_LEFT: DrainWorkerResponse.Phase
    PHASE_READY: DrainWorkerResponse.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    phase: DrainWorkerResponse.Phase
    incarnation: str
    requests: int
    requests_unknown: bool
    def __init__(self, phase: _Optional[_Union[DrainWorkerResponse.Phase, str]] = ..., incarnation: _Optional[str] = ..., requests: _Optional[int] = ..., requests_unknown: bool = ...) -> None: ...
