from blockyard.proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

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

class PullPrefixRequest(_message.Message):
    __slots__ = ("prompt", "chat", "prompt_token_ids", "cache_salt", "public_prefix", "lora_name", "worker_id", "source_id")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    chat: _inference_pb2.Chat
    prompt_token_ids: _inference_pb2.TokenIds
    cache_salt: str
    public_prefix: bool
    lora_name: str
    worker_id: str
    source_id: str
    def __init__(self, prompt: _Optional[str] = ..., chat: _Optional[_Union[_inference_pb2.Chat, _Mapping]] = ..., prompt_token_ids: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., cache_salt: _Optional[str] = ..., public_prefix: _Optional[bool] = ..., lora_name: _Optional[str] = ..., worker_id: _Optional[str] = ..., source_id: _Optional[str] = ...) -> None: ...

class PullPrefixResponse(_message.Message):
    __slots__ = ("source_id", "prompt_blocks", "blocks_before", "num_blocks", "num_bytes", "elapsed_ms")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    prompt_blocks: int
    blocks_before: int
    num_blocks: int
    num_bytes: int
    elapsed_ms: float
    def __init__(self, source_id: _Optional[str] = ..., prompt_blocks: _Optional[int] = ..., blocks_before: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., elapsed_ms: _Optional[float] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "fingerprint", "path", "rank", "num_bytes", "tenant", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    path: str
    rank: int
    num_bytes: int
    tenant: str
    model: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., path: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class AddAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "tenant", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    tenant: str
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class AddAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("name", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class RemoveAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...
