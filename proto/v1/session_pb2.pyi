from blockyard.proto.v1 import admin_pb2 as _admin_pb2
from blockyard.proto.v1 import cluster_pb2 as _cluster_pb2
from blockyard.proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PhaseKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_KIND_UNSPECIFIED: _ClassVar[PhaseKind]
    PHASE_KIND_PULL: _ClassVar[PhaseKind]
    PHASE_KIND_QUEUE: _ClassVar[PhaseKind]
    PHASE_KIND_PREFILL: _ClassVar[PhaseKind]
    PHASE_KIND_DECODE: _ClassVar[PhaseKind]
    PHASE_KIND_PREEMPTED: _ClassVar[PhaseKind]
    PHASE_KIND_SWAPPED: _ClassVar[PhaseKind]

class PullEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PULL_END_UNSPECIFIED: _ClassVar[PullEnd]
    PULL_END_WHOLE: _ClassVar[PullEnd]
    PULL_END_FEWER: _ClassVar[PullEnd]
    PULL_END_REFUSED: _ClassVar[PullEnd]
    PULL_END_UNREACHABLE: _ClassVar[PullEnd]
    PULL_END_CUT: _ClassVar[PullEnd]
    PULL_END_CORRUPT: _ClassVar[PullEnd]
    PULL_END_LATE: _ClassVar[PullEnd]
    PULL_END_CANCELLED: _ClassVar[PullEnd]
    PULL_END_AVOIDED: _ClassVar[PullEnd]

class PullRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PULL_REFUSAL_UNSPECIFIED: _ClassVar[PullRefusal]
    PULL_REFUSAL_BUSY: _ClassVar[PullRefusal]
    PULL_REFUSAL_INCARNATION: _ClassVar[PullRefusal]
    PULL_REFUSAL_LAYOUT: _ClassVar[PullRefusal]
    PULL_REFUSAL_INVALID: _ClassVar[PullRefusal]

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_REASON_UNSPECIFIED: _ClassVar[RejectReason]
    REJECT_REASON_BUSY: _ClassVar[RejectReason]
    REJECT_REASON_TOO_LARGE: _ClassVar[RejectReason]
    REJECT_REASON_INVALID: _ClassVar[RejectReason]
    REJECT_REASON_DEADLINE: _ClassVar[RejectReason]
    REJECT_REASON_INTERNAL: _ClassVar[RejectReason]
    REJECT_REASON_DRAINING: _ClassVar[RejectReason]
    REJECT_REASON_GRAMMAR: _ClassVar[RejectReason]
    REJECT_REASON_NO_CHOICE: _ClassVar[RejectReason]
    REJECT_REASON_PREEMPTED: _ClassVar[RejectReason]
    REJECT_REASON_HANDED_OVER: _ClassVar[RejectReason]
    REJECT_REASON_ADAPTER: _ClassVar[RejectReason]
PHASE_KIND_UNSPECIFIED: PhaseKind
PHASE_KIND_PULL: PhaseKind
PHASE_KIND_QUEUE: PhaseKind
PHASE_KIND_PREFILL: PhaseKind
PHASE_KIND_DECODE: PhaseKind
PHASE_KIND_PREEMPTED: PhaseKind
PHASE_KIND_SWAPPED: PhaseKind
PULL_END_UNSPECIFIED: PullEnd
PULL_END_WHOLE: PullEnd
PULL_END_FEWER: PullEnd
PULL_END_REFUSED: PullEnd
PULL_END_UNREACHABLE: PullEnd
PULL_END_CUT: PullEnd
PULL_END_CORRUPT: PullEnd
PULL_END_LATE: PullEnd
PULL_END_CANCELLED: PullEnd
PULL_END_AVOIDED: PullEnd
PULL_REFUSAL_UNSPECIFIED: PullRefusal
PULL_REFUSAL_BUSY: PullRefusal
PULL_REFUSAL_INCARNATION: PullRefusal
PULL_REFUSAL_LAYOUT: PullRefusal
PULL_REFUSAL_INVALID: PullRefusal
REJECT_REASON_UNSPECIFIED: RejectReason
REJECT_REASON_BUSY: RejectReason
REJECT_REASON_TOO_LARGE: RejectReason
REJECT_REASON_INVALID: RejectReason
REJECT_REASON_DEADLINE: RejectReason
REJECT_REASON_INTERNAL: RejectReason
REJECT_REASON_DRAINING: RejectReason
REJECT_REASON_GRAMMAR: RejectReason
REJECT_REASON_NO_CHOICE: RejectReason
REJECT_REASON_PREEMPTED: RejectReason
REJECT_REASON_HANDED_OVER: RejectReason
REJECT_REASON_ADAPTER: RejectReason

class PullBlocksRequest(_message.Message):
    __slots__ = ("block_names", "pull", "tenant")
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    block_names: bytes
    pull: Pull
    tenant: int
    def __init__(self, block_names: _Optional[bytes] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., tenant: _Optional[int] = ...) -> None: ...

class PullBlocksResponse(_message.Message):
    __slots__ = ("report", "blocks_before")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    report: PullReport
    blocks_before: int
    def __init__(self, report: _Optional[_Union[PullReport, _Mapping]] = ..., blocks_before: _Optional[int] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("submit", "cancel", "ping", "measure_link")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    MEASURE_LINK_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    ping: Ping
    measure_link: MeasureLink
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., measure_link: _Optional[_Union[MeasureLink, _Mapping]] = ...) -> None: ...

class ToRouter(_message.Message):
    __slots__ = ("hello", "step", "rejected", "pong", "draining")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: StepOutput
    rejected: Rejected
    pong: Pong
    draining: Draining
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "model_fingerprint", "tokenizer_fingerprint", "block_size", "kv_dtype", "total_blocks", "max_model_len", "vocab_size", "device", "engine", "version", "load", "index_stride_blocks", "max_waiting", "is_draining", "stalled_seconds", "transfer_port", "block_bytes", "num_ranks", "role", "max_loras", "model", "kv_layout", "kv_arithmetic")
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
    INDEX_STRIDE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PORT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KV_ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
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
    index_stride_blocks: int
    max_waiting: int
    is_draining: bool
    stalled_seconds: float
    transfer_port: int
    block_bytes: int
    num_ranks: int
    role: str
    max_loras: int
    model: str
    kv_layout: str
    kv_arithmetic: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., total_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., device: _Optional[str] = ..., engine: _Optional[str] = ..., version: _Optional[str] = ..., load: _Optional[_Union[_cluster_pb2.WorkerLoad, _Mapping]] = ..., index_stride_blocks: _Optional[int] = ..., max_waiting: _Optional[int] = ..., is_draining: _Optional[bool] = ..., stalled_seconds: _Optional[float] = ..., transfer_port: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_ranks: _Optional[int] = ..., role: _Optional[str] = ..., max_loras: _Optional[int] = ..., model: _Optional[str] = ..., kv_layout: _Optional[str] = ..., kv_arithmetic: _Optional[str] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("is_draining",)
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    is_draining: bool
    def __init__(self, is_draining: _Optional[bool] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "token_ids", "prompt_tokens", "block_names", "sampling", "deadline_seconds", "continuations", "priority", "tenant", "client", "pull", "preemptions", "expected_pause_seconds", "hands_over", "wants_phases", "lora_name", "lora_fingerprint")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HANDS_OVER_FIELD_NUMBER: _ClassVar[int]
    WANTS_PHASES_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    token_ids: bytes
    prompt_tokens: int
    block_names: bytes
    sampling: EngineSampling
    deadline_seconds: float
    continuations: _containers.RepeatedCompositeFieldContainer[Continuation]
    priority: int
    tenant: int
    client: int
    pull: Pull
    preemptions: int
    expected_pause_seconds: float
    hands_over: bool
    wants_phases: bool
    lora_name: str
    lora_fingerprint: str
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., block_names: _Optional[bytes] = ..., sampling: _Optional[_Union[EngineSampling, _Mapping]] = ..., deadline_seconds: _Optional[float] = ..., continuations: _Optional[_Iterable[_Union[Continuation, _Mapping]]] = ..., priority: _Optional[int] = ..., tenant: _Optional[int] = ..., client: _Optional[int] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., preemptions: _Optional[int] = ..., expected_pause_seconds: _Optional[float] = ..., hands_over: _Optional[bool] = ..., wants_phases: _Optional[bool] = ..., lora_name: _Optional[str] = ..., lora_fingerprint: _Optional[str] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("address", "incarnation", "num_blocks", "seconds")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    num_blocks: int
    seconds: float
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., num_blocks: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("index", "token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: bytes
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class EngineSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "max_tokens", "min_tokens", "seed", "stop_token_ids", "eos_token_ids", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_token_ids", "logprobs", "prompt_logprobs", "n", "beam_width", "length_penalty", "early_stopping", "structured_output", "embeds")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    min_tokens: int
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    n: int
    beam_width: int
    length_penalty: float
    early_stopping: _inference_pb2.EarlyStopping
    structured_output: _inference_pb2.StructuredOutput
    embeds: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., n: _Optional[int] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[_inference_pb2.EarlyStopping, str]] = ..., structured_output: _Optional[_Union[_inference_pb2.StructuredOutput, _Mapping]] = ..., embeds: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle", "index")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    handle: int
    index: int
    def __init__(self, handle: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class MeasureLink(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce", "report_seconds", "room_elsewhere")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REPORT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROOM_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    report_seconds: float
    room_elsewhere: Room
    def __init__(self, nonce: _Optional[int] = ..., report_seconds: _Optional[float] = ..., room_elsewhere: _Optional[_Union[Room, _Mapping]] = ...) -> None: ...

class Room(_message.Message):
    __slots__ = ("blocks", "pull_setup_seconds", "pull_bytes_per_second")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PULL_SETUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PULL_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    pull_setup_seconds: float
    pull_bytes_per_second: float
    def __init__(self, blocks: _Optional[int] = ..., pull_setup_seconds: _Optional[float] = ..., pull_bytes_per_second: _Optional[float] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "load", "index", "stalled_seconds", "is_draining", "last_handle")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    LAST_HANDLE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    load: _cluster_pb2.WorkerLoad
    index: _cluster_pb2.WorkerIndex
    stalled_seconds: float
    is_draining: bool
    last_handle: int
    def __init__(self, nonce: _Optional[int] = ..., load: _Optional[_Union[_cluster_pb2.WorkerLoad, _Mapping]] = ..., index: _Optional[_Union[_cluster_pb2.WorkerIndex, _Mapping]] = ..., stalled_seconds: _Optional[float] = ..., is_draining: _Optional[bool] = ..., last_handle: _Optional[int] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("handles", "token_offsets", "token_counts", "token_ids", "finish_reasons", "stop_tokens", "cached_tokens", "load", "failed_handles", "failed_reasons", "indexes", "details", "arrived_marks", "last_handle", "withdrawn_marks", "pulls", "phases")
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
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_MARKS_FIELD_NUMBER: _ClassVar[int]
    LAST_HANDLE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_MARKS_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
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
    indexes: _containers.RepeatedScalarFieldContainer[int]
    details: _containers.RepeatedCompositeFieldContainer[RowDetails]
    arrived_marks: bytes
    last_handle: int
    withdrawn_marks: bytes
    pulls: _containers.RepeatedCompositeFieldContainer[PullReport]
    phases: _containers.RepeatedCompositeFieldContainer[Phase]
    def __init__(self, handles: _Optional[_Iterable[int]] = ..., token_offsets: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reasons: _Optional[_Iterable[int]] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., load: _Optional[_Union[_cluster_pb2.WorkerLoad, _Mapping]] = ..., failed_handles: _Optional[_Iterable[int]] = ..., failed_reasons: _Optional[_Iterable[_Union[RejectReason, str]]] = ..., indexes: _Optional[_Iterable[int]] = ..., details: _Optional[_Iterable[_Union[RowDetails, _Mapping]]] = ..., arrived_marks: _Optional[bytes] = ..., last_handle: _Optional[int] = ..., withdrawn_marks: _Optional[bytes] = ..., pulls: _Optional[_Iterable[_Union[PullReport, _Mapping]]] = ..., phases: _Optional[_Iterable[_Union[Phase, _Mapping]]] = ...) -> None: ...

class Phase(_message.Message):
    __slots__ = ("handle", "kind", "began_seconds", "ended_seconds", "steps", "tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BEGAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    kind: PhaseKind
    began_seconds: float
    ended_seconds: float
    steps: int
    tokens: int
    def __init__(self, handle: _Optional[int] = ..., kind: _Optional[_Union[PhaseKind, str]] = ..., began_seconds: _Optional[float] = ..., ended_seconds: _Optional[float] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class PullReport(_message.Message):
    __slots__ = ("handle", "end", "num_blocks", "num_bytes", "setup_seconds", "transfer_seconds", "refusal")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SETUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    handle: int
    end: PullEnd
    num_blocks: int
    num_bytes: int
    setup_seconds: float
    transfer_seconds: float
    refusal: PullRefusal
    def __init__(self, handle: _Optional[int] = ..., end: _Optional[_Union[PullEnd, str]] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., setup_seconds: _Optional[float] = ..., transfer_seconds: _Optional[float] = ..., refusal: _Optional[_Union[PullRefusal, str]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("incarnation", "layout", "names", "first_block", "seconds", "trial_bytes", "ways")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRIAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    layout: str
    names: bytes
    first_block: int
    seconds: float
    trial_bytes: int
    ways: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, incarnation: _Optional[str] = ..., layout: _Optional[str] = ..., names: _Optional[bytes] = ..., first_block: _Optional[int] = ..., seconds: _Optional[float] = ..., trial_bytes: _Optional[int] = ..., ways: _Optional[_Iterable[str]] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("refusal", "num_blocks", "way", "access")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    refusal: PullRefusal
    num_blocks: int
    way: str
    access: bytes
    def __init__(self, refusal: _Optional[_Union[PullRefusal, str]] = ..., num_blocks: _Optional[int] = ..., way: _Optional[str] = ..., access: _Optional[bytes] = ...) -> None: ...

class RowDetails(_message.Message):
    __slots__ = ("row", "logprobs", "prompt_logprobs", "cumulative_logprob", "beam_score", "embedding")
    ROW_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    BEAM_SCORE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    row: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprob]
    cumulative_logprob: float
    beam_score: float
    embedding: bytes
    def __init__(self, row: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprob, _Mapping]]] = ..., cumulative_logprob: _Optional[float] = ..., beam_score: _Optional[float] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handle", "reason", "detail")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: RejectReason
    detail: str
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[_Union[RejectReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...
