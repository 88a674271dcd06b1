from blockyard.proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "grace_seconds", "force")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace_seconds: float
    force: bool
    def __init__(self, worker_id: _Optional[str] = ..., grace_seconds: _Optional[float] = ..., force: _Optional[bool] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("moved",)
    MOVED_FIELD_NUMBER: _ClassVar[int]
    moved: int
    def __init__(self, moved: _Optional[int] = ...) -> None: ...

class ResumeWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class ResumeWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("flushed_blocks", "flushed_host_blocks")
    FLUSHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    flushed_blocks: int
    flushed_host_blocks: int
    def __init__(self, flushed_blocks: _Optional[int] = ..., flushed_host_blocks: _Optional[int] = ...) -> None: ...

class RebuildIndexRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class RebuildIndexResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    def __init__(self, workers: _Optional[int] = ...) -> None: ...
