from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker", "remove")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    remove: bool
    def __init__(self, worker: _Optional[str] = ..., remove: bool = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("phase", "incarnation", "requests")
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
    phase: DrainWorkerResponse.Phase
    incarnation: str
    requests: int
    def __init__(self, phase: _Optional[_Union[DrainWorkerResponse.Phase, str]] = ..., incarnation: _Optional[str] = ..., requests: _Optional[int] = ...) -> None: ...
