from blockyard.proto.v1 import cluster_pb2 as _cluster_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_REASON_UNSPECIFIED: _ClassVar[RejectReason]
    REJECT_REASON_BUSY: _ClassVar[RejectReason]
    REJECT_REASON_TOO_LARGE: _ClassVar[RejectReason]
    REJECT_REASON_INVALID: _ClassVar[RejectReason]
    REJECT_REASON_DEADLINE: _ClassVar[RejectReason]
    REJECT_REASON_INTERNAL: _ClassVar[RejectReason]
    REJECT_REASON_DRAINING: _ClassVar[RejectReason]
REJECT_REASON_UNSPECIFIED: RejectReason
REJECT_REASON_BUSY: RejectReason
REJECT_REASON_TOO_LARGE: RejectReason
REJECT_REASON_INVALID: RejectReason
REJECT_REASON_DEADLINE: RejectReason
REJECT_REASON_INTERNAL: RejectReason
REJECT_REASON_DRAINING: RejectReason

class ToWorker(_message.Message):
    __slots__ = ("submit", "cancel", "ping")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    ping: Ping
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class ToRouter(_message.Message):
    __slots__ = ("hello", "step", "rejected", "pong")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: StepOutput
    rejected: Rejected
    pong: Pong
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "model_fingerprint", "tokenizer_fingerprint", "block_size", "kv_dtype", "total_blocks", "max_model_len", "vocab_size", "device", "engine", "version", "load")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    block_size: int
    kv_dtype: str
    total_blocks: int
    max_model_len: int
    vocab_size: int
    device: str
    engine: str
    version: str
    load: _cluster_pb2.WorkerLoad
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., total_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., device: _Optional[str] = ..., engine: _Optional[str] = ..., version: _Optional[str] = ..., load: _Optional[_Union[_cluster_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "token_ids", "prompt_tokens", "block_names", "sampling", "deadline_seconds")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    token_ids: bytes
    prompt_tokens: int
    block_names: bytes
    sampling: EngineSampling
    deadline_seconds: float
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., block_names: _Optional[bytes] = ..., sampling: _Optional[_Union[EngineSampling, _Mapping]] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class EngineSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "max_tokens", "min_tokens", "seed", "stop_token_ids", "eos_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    min_tokens: int
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "load")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    load: _cluster_pb2.WorkerLoad
    def __init__(self, nonce: _Optional[int] = ..., load: _Optional[_Union[_cluster_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("handles", "token_offsets", "token_counts", "token_ids", "finish_reasons", "stop_tokens", "cached_tokens", "load", "failed_handles", "failed_reasons")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FAILED_HANDLES_FIELD_NUMBER: _ClassVar[int]
    FAILED_REASONS_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    token_offsets: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reasons: _containers.RepeatedScalarFieldContainer[int]
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    load: _cluster_pb2.WorkerLoad
    failed_handles: _containers.RepeatedScalarFieldContainer[int]
    failed_reasons: _containers.RepeatedScalarFieldContainer[RejectReason]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., token_offsets: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reasons: _Optional[_Iterable[int]] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., load: _Optional[_Union[_cluster_pb2.WorkerLoad, _Mapping]] = ..., failed_handles: _Optional[_Iterable[int]] = ..., failed_reasons: _Optional[_Iterable[_Union[RejectReason, str]]] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handle", "reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: RejectReason
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[RejectReason, str]] = ...) -> None: ...
