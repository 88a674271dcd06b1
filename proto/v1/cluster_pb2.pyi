from blockyard.proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IndexState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDEX_STATE_UNSPECIFIED: _ClassVar[IndexState]
    INDEX_STATE_ABSENT: _ClassVar[IndexState]
    INDEX_STATE_EXACT: _ClassVar[IndexState]
    INDEX_STATE_DEGRADED: _ClassVar[IndexState]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_CONNECTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_SUSPECT: _ClassVar[WorkerState]
    WORKER_STATE_REFUSED: _ClassVar[WorkerState]
    WORKER_STATE_LOST: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_FREE: _ClassVar[BlockState]
    BLOCK_STATE_CACHED: _ClassVar[BlockState]
    BLOCK_STATE_USED: _ClassVar[BlockState]

class SequenceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_STATE_UNSPECIFIED: _ClassVar[SequenceState]
    SEQUENCE_STATE_WAITING: _ClassVar[SequenceState]
    SEQUENCE_STATE_RUNNING: _ClassVar[SequenceState]

class PullVerdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PULL_VERDICT_UNSPECIFIED: _ClassVar[PullVerdict]
    PULL_VERDICT_CHOSEN: _ClassVar[PullVerdict]
    PULL_VERDICT_TIE: _ClassVar[PullVerdict]
    PULL_VERDICT_OTHER_SOURCE: _ClassVar[PullVerdict]
    PULL_VERDICT_UNMEASURED: _ClassVar[PullVerdict]
    PULL_VERDICT_MEMORY: _ClassVar[PullVerdict]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_QUEUED: _ClassVar[RequestState]
    REQUEST_STATE_PLACED: _ClassVar[RequestState]
    REQUEST_STATE_STREAMING: _ClassVar[RequestState]
INDEX_STATE_UNSPECIFIED: IndexState
INDEX_STATE_ABSENT: IndexState
INDEX_STATE_EXACT: IndexState
INDEX_STATE_DEGRADED: IndexState
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_CONNECTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_SUSPECT: WorkerState
WORKER_STATE_REFUSED: WorkerState
WORKER_STATE_LOST: WorkerState
WORKER_STATE_DRAINING: WorkerState
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_FREE: BlockState
BLOCK_STATE_CACHED: BlockState
BLOCK_STATE_USED: BlockState
SEQUENCE_STATE_UNSPECIFIED: SequenceState
SEQUENCE_STATE_WAITING: SequenceState
SEQUENCE_STATE_RUNNING: SequenceState
PULL_VERDICT_UNSPECIFIED: PullVerdict
PULL_VERDICT_CHOSEN: PullVerdict
PULL_VERDICT_TIE: PullVerdict
PULL_VERDICT_OTHER_SOURCE: PullVerdict
PULL_VERDICT_UNMEASURED: PullVerdict
PULL_VERDICT_MEMORY: PullVerdict
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_QUEUED: RequestState
REQUEST_STATE_PLACED: RequestState
REQUEST_STATE_STREAMING: RequestState

class GetClusterInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterInfo(_message.Message):
    __slots__ = ("cluster", "version", "model", "policy", "index_available", "workers_ready", "workers_known", "requests_running", "requests_waiting", "index_state", "migrations", "requests_lost", "requests_quarantined", "first_token", "inter_token", "pulls", "splits", "models")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    INDEX_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_READY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    INDEX_STATE_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_LOST_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    version: str
    model: _inference_pb2.Model
    policy: str
    index_available: bool
    workers_ready: int
    workers_known: int
    requests_running: int
    requests_waiting: int
    index_state: IndexState
    migrations: int
    requests_lost: int
    requests_quarantined: int
    first_token: Latencies
    inter_token: Latencies
    pulls: _containers.RepeatedCompositeFieldContainer[RecentPull]
    splits: int
    models: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Model]
    def __init__(self, cluster: _Optional[str] = ..., version: _Optional[str] = ..., model: _Optional[_Union[_inference_pb2.Model, _Mapping]] = ..., policy: _Optional[str] = ..., index_available: _Optional[bool] = ..., workers_ready: _Optional[int] = ..., workers_known: _Optional[int] = ..., requests_running: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., index_state: _Optional[_Union[IndexState, str]] = ..., migrations: _Optional[int] = ..., requests_lost: _Optional[int] = ..., requests_quarantined: _Optional[int] = ..., first_token: _Optional[_Union[Latencies, _Mapping]] = ..., inter_token: _Optional[_Union[Latencies, _Mapping]] = ..., pulls: _Optional[_Iterable[_Union[RecentPull, _Mapping]]] = ..., splits: _Optional[int] = ..., models: _Optional[_Iterable[_Union[_inference_pb2.Model, _Mapping]]] = ...) -> None: ...

class RecentPull(_message.Message):
    __slots__ = ("number", "worker_id", "source_id", "end", "planned_bytes", "planned_ms", "num_blocks", "num_bytes", "elapsed_ms", "saved_ms", "ended_seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PLANNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLANNED_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_MS_FIELD_NUMBER: _ClassVar[int]
    SAVED_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    worker_id: str
    source_id: str
    end: str
    planned_bytes: int
    planned_ms: float
    num_blocks: int
    num_bytes: int
    elapsed_ms: float
    saved_ms: float
    ended_seconds: float
    def __init__(self, number: _Optional[int] = ..., worker_id: _Optional[str] = ..., source_id: _Optional[str] = ..., end: _Optional[str] = ..., planned_bytes: _Optional[int] = ..., planned_ms: _Optional[float] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., elapsed_ms: _Optional[float] = ..., saved_ms: _Optional[float] = ..., ended_seconds: _Optional[float] = ...) -> None: ...

class Latencies(_message.Message):
    __slots__ = ("bounds_seconds", "cumulative")
    BOUNDS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_FIELD_NUMBER: _ClassVar[int]
    bounds_seconds: _containers.RepeatedScalarFieldContainer[float]
    cumulative: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bounds_seconds: _Optional[_Iterable[float]] = ..., cumulative: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerIndex(_message.Message):
    __slots__ = ("state", "entries", "pending", "lag_seconds", "resyncs", "errors", "state_reason", "damages", "cut_off", "shards")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    STATE_REASON_FIELD_NUMBER: _ClassVar[int]
    DAMAGES_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    state: IndexState
    entries: int
    pending: int
    lag_seconds: float
    resyncs: int
    errors: int
    state_reason: str
    damages: int
    cut_off: bool
    shards: _containers.RepeatedCompositeFieldContainer[WorkerIndex]
    def __init__(self, state: _Optional[_Union[IndexState, str]] = ..., entries: _Optional[int] = ..., pending: _Optional[int] = ..., lag_seconds: _Optional[float] = ..., resyncs: _Optional[int] = ..., errors: _Optional[int] = ..., state_reason: _Optional[str] = ..., damages: _Optional[int] = ..., cut_off: _Optional[bool] = ..., shards: _Optional[_Iterable[_Union[WorkerIndex, _Mapping]]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "queued_prefill_tokens", "free_blocks", "cached_blocks", "used_blocks", "prefill_tokens_per_second", "decode_tokens_per_second", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "host_cached_blocks", "swaps", "host_tokens_per_second", "context_tokens", "queued_pairs", "step_seconds", "steps", "prompt_steps", "step_prompt_tokens", "step_excess_tokens", "step_decodes", "step_context_tokens", "step_pairs", "pull_setup_seconds", "pull_bytes_per_second", "pulling_bytes", "lending_bytes", "pulled_blocks", "lent_blocks", "failed_pulls", "moves", "adapters", "adapter_load_seconds", "adapter_loads", "drafted_tokens", "accepted_tokens")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_EXCESS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_DECODES_FIELD_NUMBER: _ClassVar[int]
    STEP_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_PAIRS_FIELD_NUMBER: _ClassVar[int]
    PULL_SETUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PULL_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PULLING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PULLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_PULLS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_prefill_tokens: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    host_cached_blocks: int
    swaps: int
    host_tokens_per_second: float
    context_tokens: int
    queued_pairs: int
    step_seconds: float
    steps: int
    prompt_steps: int
    step_prompt_tokens: int
    step_excess_tokens: int
    step_decodes: int
    step_context_tokens: int
    step_pairs: int
    pull_setup_seconds: float
    pull_bytes_per_second: float
    pulling_bytes: int
    lending_bytes: int
    pulled_blocks: int
    lent_blocks: int
    failed_pulls: int
    moves: int
    adapters: _containers.RepeatedCompositeFieldContainer[ResidentAdapter]
    adapter_load_seconds: float
    adapter_loads: int
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., decode_tokens_per_second: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., host_cached_blocks: _Optional[int] = ..., swaps: _Optional[int] = ..., host_tokens_per_second: _Optional[float] = ..., context_tokens: _Optional[int] = ..., queued_pairs: _Optional[int] = ..., step_seconds: _Optional[float] = ..., steps: _Optional[int] = ..., prompt_steps: _Optional[int] = ..., step_prompt_tokens: _Optional[int] = ..., step_excess_tokens: _Optional[int] = ..., step_decodes: _Optional[int] = ..., step_context_tokens: _Optional[int] = ..., step_pairs: _Optional[int] = ..., pull_setup_seconds: _Optional[float] = ..., pull_bytes_per_second: _Optional[float] = ..., pulling_bytes: _Optional[int] = ..., lending_bytes: _Optional[int] = ..., pulled_blocks: _Optional[int] = ..., lent_blocks: _Optional[int] = ..., failed_pulls: _Optional[int] = ..., moves: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[ResidentAdapter, _Mapping]]] = ..., adapter_load_seconds: _Optional[float] = ..., adapter_loads: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class ResidentAdapter(_message.Message):
    __slots__ = ("fingerprint", "rank", "num_bytes", "load_seconds", "running", "requests_per_second")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    rank: int
    num_bytes: int
    load_seconds: float
    running: int
    requests_per_second: float
    def __init__(self, fingerprint: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., load_seconds: _Optional[float] = ..., running: _Optional[int] = ..., requests_per_second: _Optional[float] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "state", "state_reason", "total_blocks", "block_size", "device", "engine", "load", "seconds_since_heard", "index", "num_ranks", "role", "max_loras", "model", "kv_layout")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_REASON_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_HEARD_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    state: WorkerState
    state_reason: str
    total_blocks: int
    block_size: int
    device: str
    engine: str
    load: WorkerLoad
    seconds_since_heard: float
    index: WorkerIndex
    num_ranks: int
    role: str
    max_loras: int
    model: str
    kv_layout: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., state_reason: _Optional[str] = ..., total_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., device: _Optional[str] = ..., engine: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., seconds_since_heard: _Optional[float] = ..., index: _Optional[_Union[WorkerIndex, _Mapping]] = ..., num_ranks: _Optional[int] = ..., role: _Optional[str] = ..., max_loras: _Optional[int] = ..., model: _Optional[str] = ..., kv_layout: _Optional[str] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class GetBlockPoolRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("state", "length", "references")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    state: BlockState
    length: int
    references: int
    def __init__(self, state: _Optional[_Union[BlockState, str]] = ..., length: _Optional[int] = ..., references: _Optional[int] = ...) -> None: ...

class BlockPool(_message.Message):
    __slots__ = ("worker_id", "incarnation", "block_size", "bytes_per_block", "total_blocks", "free_blocks", "cached_blocks", "used_blocks", "runs", "load", "host_cache_blocks", "evictions")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    block_size: int
    bytes_per_block: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    load: WorkerLoad
    host_cache_blocks: int
    evictions: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., block_size: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., host_cache_blocks: _Optional[int] = ..., evictions: _Optional[int] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("worker_id", "page_size", "page_token")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    page_size: int
    page_token: str
    def __init__(self, worker_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("block_id", "state", "references", "name", "request_ids", "parent", "age_seconds")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    state: BlockState
    references: int
    name: bytes
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    parent: bytes
    age_seconds: float
    def __init__(self, block_id: _Optional[int] = ..., state: _Optional[_Union[BlockState, str]] = ..., references: _Optional[int] = ..., name: _Optional[bytes] = ..., request_ids: _Optional[_Iterable[str]] = ..., parent: _Optional[bytes] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_page_token")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    next_page_token: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class FindBlocksRequest(_message.Message):
    __slots__ = ("worker_id", "block_ids", "names")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, worker_id: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FindBlocksResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("worker_id", "page_size", "page_token", "sequence_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    page_size: int
    page_token: str
    sequence_id: int
    def __init__(self, worker_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., sequence_id: _Optional[int] = ...) -> None: ...

class SequenceInfo(_message.Message):
    __slots__ = ("sequence_id", "request_id", "index", "state", "prompt_tokens", "generated_tokens", "computed_tokens", "cached_tokens", "preemptions", "priority", "num_blocks", "block_table", "drafted_tokens", "accepted_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    request_id: str
    index: int
    state: SequenceState
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    cached_tokens: int
    preemptions: int
    priority: int
    num_blocks: int
    block_table: _containers.RepeatedScalarFieldContainer[int]
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, sequence_id: _Optional[int] = ..., request_id: _Optional[str] = ..., index: _Optional[int] = ..., state: _Optional[_Union[SequenceState, str]] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., priority: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_table: _Optional[_Iterable[int]] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences", "next_page_token")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    next_page_token: str
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class LookupPrefixRequest(_message.Message):
    __slots__ = ("prompt", "chat", "prompt_token_ids", "cache_salt", "public_prefix", "lora_name", "model")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    chat: _inference_pb2.Chat
    prompt_token_ids: _inference_pb2.TokenIds
    cache_salt: str
    public_prefix: bool
    lora_name: str
    model: str
    def __init__(self, prompt: _Optional[str] = ..., chat: _Optional[_Union[_inference_pb2.Chat, _Mapping]] = ..., prompt_token_ids: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., cache_salt: _Optional[str] = ..., public_prefix: _Optional[bool] = ..., lora_name: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class PrefixHolder(_message.Message):
    __slots__ = ("worker_id", "cached_blocks", "host_cached_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    cached_blocks: int
    host_cached_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., cached_blocks: _Optional[int] = ..., host_cached_blocks: _Optional[int] = ...) -> None: ...

class LookupPrefixResponse(_message.Message):
    __slots__ = ("prompt_tokens", "prompt_blocks", "holders", "index_available", "block_names")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    INDEX_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    prompt_blocks: int
    holders: _containers.RepeatedCompositeFieldContainer[PrefixHolder]
    index_available: bool
    block_names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, prompt_tokens: _Optional[int] = ..., prompt_blocks: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[PrefixHolder, _Mapping]]] = ..., index_available: _Optional[bool] = ..., block_names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExplainPlacementRequest(_message.Message):
    __slots__ = ("prompt", "chat", "prompt_token_ids", "cache_salt", "session_id", "public_prefix", "lora_name", "model")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_PREFIX_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    chat: _inference_pb2.Chat
    prompt_token_ids: _inference_pb2.TokenIds
    cache_salt: str
    session_id: str
    public_prefix: bool
    lora_name: str
    model: str
    def __init__(self, prompt: _Optional[str] = ..., chat: _Optional[_Union[_inference_pb2.Chat, _Mapping]] = ..., prompt_token_ids: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., cache_salt: _Optional[str] = ..., session_id: _Optional[str] = ..., public_prefix: _Optional[bool] = ..., lora_name: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class PlacementCandidate(_message.Message):
    __slots__ = ("worker_id", "cached_tokens", "uncached_tokens", "queue_ms", "prefill_ms", "decode_ms", "memory_ms", "total_ms", "host_cached_tokens", "host_load_ms", "cost", "interference_ms", "pulled_tokens", "pull_ms", "pulled_from", "pull_options", "adapter_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    INTERFERENCE_MS_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULL_MS_FIELD_NUMBER: _ClassVar[int]
    PULLED_FROM_FIELD_NUMBER: _ClassVar[int]
    PULL_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    cached_tokens: int
    uncached_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    memory_ms: float
    total_ms: float
    host_cached_tokens: int
    host_load_ms: float
    cost: float
    interference_ms: float
    pulled_tokens: int
    pull_ms: float
    pulled_from: str
    pull_options: _containers.RepeatedCompositeFieldContainer[PullOption]
    adapter_ms: float
    def __init__(self, worker_id: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., memory_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., host_cached_tokens: _Optional[int] = ..., host_load_ms: _Optional[float] = ..., cost: _Optional[float] = ..., interference_ms: _Optional[float] = ..., pulled_tokens: _Optional[int] = ..., pull_ms: _Optional[float] = ..., pulled_from: _Optional[str] = ..., pull_options: _Optional[_Iterable[_Union[PullOption, _Mapping]]] = ..., adapter_ms: _Optional[float] = ...) -> None: ...

class PullOption(_message.Message):
    __slots__ = ("source_id", "verdict", "pulled_tokens", "time_ms", "saved_ms")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    SAVED_MS_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    verdict: PullVerdict
    pulled_tokens: int
    time_ms: float
    saved_ms: float
    def __init__(self, source_id: _Optional[str] = ..., verdict: _Optional[_Union[PullVerdict, str]] = ..., pulled_tokens: _Optional[int] = ..., time_ms: _Optional[float] = ..., saved_ms: _Optional[float] = ...) -> None: ...

class ExplainPlacementResponse(_message.Message):
    __slots__ = ("policy", "chosen_worker_id", "candidates", "index_available", "split")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    INDEX_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    policy: str
    chosen_worker_id: str
    candidates: _containers.RepeatedCompositeFieldContainer[PlacementCandidate]
    index_available: bool
    split: SplitPlacement
    def __init__(self, policy: _Optional[str] = ..., chosen_worker_id: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[PlacementCandidate, _Mapping]]] = ..., index_available: _Optional[bool] = ..., split: _Optional[_Union[SplitPlacement, _Mapping]] = ...) -> None: ...

class SplitPlacement(_message.Message):
    __slots__ = ("is_chosen", "prefill", "decode", "split_ms", "local_ms")
    IS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_MS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_MS_FIELD_NUMBER: _ClassVar[int]
    is_chosen: bool
    prefill: PlacementCandidate
    decode: PlacementCandidate
    split_ms: float
    local_ms: float
    def __init__(self, is_chosen: _Optional[bool] = ..., prefill: _Optional[_Union[PlacementCandidate, _Mapping]] = ..., decode: _Optional[_Union[PlacementCandidate, _Mapping]] = ..., split_ms: _Optional[float] = ..., local_ms: _Optional[float] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("request_id", "state", "worker_id", "prompt_tokens", "generated_tokens", "age_seconds", "tenant", "cached_tokens", "pulled_blocks", "pulled_from", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PULLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PULLED_FROM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: RequestState
    worker_id: str
    prompt_tokens: int
    generated_tokens: int
    age_seconds: float
    tenant: str
    cached_tokens: int
    pulled_blocks: int
    pulled_from: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., worker_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., age_seconds: _Optional[float] = ..., tenant: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., pulled_blocks: _Optional[int] = ..., pulled_from: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping]]] = ...) -> None: ...

class GetIndexInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class IndexInfo(_message.Message):
    __slots__ = ("state", "state_reason", "names", "bytes", "live_berths", "dead_berths", "stride_blocks", "lookups", "failed_lookups", "skipped_lookups", "lookup_p50_seconds", "lookup_p99_seconds", "promised_blocks", "stale_blocks", "workers")
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_REASON_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_BERTHS_FIELD_NUMBER: _ClassVar[int]
    DEAD_BERTHS_FIELD_NUMBER: _ClassVar[int]
    STRIDE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    FAILED_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STALE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    state: IndexState
    state_reason: str
    names: int
    bytes: int
    live_berths: int
    dead_berths: int
    stride_blocks: int
    lookups: int
    failed_lookups: int
    skipped_lookups: int
    lookup_p50_seconds: float
    lookup_p99_seconds: float
    promised_blocks: int
    stale_blocks: int
    workers: _containers.RepeatedCompositeFieldContainer[IndexedWorker]
    def __init__(self, state: _Optional[_Union[IndexState, str]] = ..., state_reason: _Optional[str] = ..., names: _Optional[int] = ..., bytes: _Optional[int] = ..., live_berths: _Optional[int] = ..., dead_berths: _Optional[int] = ..., stride_blocks: _Optional[int] = ..., lookups: _Optional[int] = ..., failed_lookups: _Optional[int] = ..., skipped_lookups: _Optional[int] = ..., lookup_p50_seconds: _Optional[float] = ..., lookup_p99_seconds: _Optional[float] = ..., promised_blocks: _Optional[int] = ..., stale_blocks: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[IndexedWorker, _Mapping]]] = ...) -> None: ...

class IndexedWorker(_message.Message):
    __slots__ = ("worker_id", "index")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    index: WorkerIndex
    def __init__(self, worker_id: _Optional[str] = ..., index: _Optional[_Union[WorkerIndex, _Mapping]] = ...) -> None: ...
