"""Every setting of a worker, with its unit, in two frozen values."""

import argparse
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from blockyard.proto.metrics.readings import MetricNames
from blockyard.proto.runtime.grace import DEFAULT_GRACE_SECONDS
from blockyard.proto.runtime.logs import LogConfig
from blockyard.proto.security.tls_files import SessionTls
from blockyard.worker.memory.kv_size import KVCacheDtype
from blockyard.worker.scheduling.preemption import PreemptionMode
from blockyard.worker.simulated.faults import SimulatedFault

EngineKind = Literal["model", "simulated"]
DEFAULT_STALL_SECONDS = 60.0
DEFAULT_LEASE_SECONDS = 3.0
DEFAULT_MAX_WAITING = 64


def check_worker_limits(*, lease_seconds: float, max_waiting: int) -> None:
    """Of a worker's config and of what starts workers, which refuses bad ones before Ray runs. Raises ValueError."""
    if not 0 < lease_seconds < math.inf:
        raise ValueError(f"lease_seconds must be finite and above 0, not {lease_seconds:g}")
    if max_waiting < 1:
        raise ValueError(f"max_waiting must be at least 1, not {max_waiting}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine runs and how much of the machine it may take. Raises ValueError for bad values."""

    model: str
    """A local folder in Hugging Face format, or a hub name with or without `@REVISION`."""
    tokenizer: str | None = None
    """Another folder or hub name, for the tokenizer alone."""
    engine: EngineKind = "model"
    """`simulated` keeps scheduler, pool and cache, and replaces the model by a clock."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    """What keys and values are kept in: `auto` as dtype, int8 or fp8 (e4m3) with a scale for each token and kv head,
    which hold nearly twice as many tokens as 16 bits."""
    load_format: Literal["auto", "random"] = "auto"
    """`random` makes weights from the config alone: for benchmarks."""
    seed: int = 0
    """Of random weights."""
    block_size: Literal[16, 32, 64, 128] = 16
    """Tokens in a block of KV cache."""
    index_stride_tokens: int | None = None
    """The prefix index knows prefixes in steps of so many tokens, a multiple of the block size: fewer entries, coarser
    hints. None: of one block, which is exact."""
    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_model_len: int | None = None
    """Tokens of prompt and output together. None: what the model's config says."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that this worker may take: weights, the largest step, which is measured, and for the
    rest KV cache."""
    kv_cache_memory: int | None = None
    """Bytes of KV cache. None: from gpu_memory_utilization; on a CPU 1 GiB."""
    swap_space_gib: float | None = None
    """Host memory for the blocks of preempted sequences, in GiB. None: on a GPU 4 GiB, or a quarter of the memory that
    is available if that is less; on a CPU, where it would be the same memory, none."""
    host_cache_gib: float = 0.0
    """Host memory for prefixes that the KV cache has evicted, in GiB."""
    verify_host_memory: bool = False
    """Check by checksum that a block which comes back from host memory is what went there. Waits for each copy; always
    on in deterministic mode."""
    preempt: PreemptionMode = "auto"
    """What becomes of the blocks of a preempted sequence: moved to host memory and back, or computed again. `auto`
    takes what is faster, by measured rates."""
    max_preemptions: int = 4
    """Of one sequence; after so many it is safe from them."""
    spared_cache_share: float = 0.05
    """Of the KV cache: so much of what the others have cached no tenant's work takes, however much of it there is."""
    priority_ageing_seconds: float = 10.0
    """So long a request waits until it passes younger ones that are one step of priority better."""
    mixed_step_seconds: float = 0.2
    """What a step in which sequences decode may take for prompts beside them, by the measured rate: the longest pause
    between two tokens that a long prompt should cause. 0: as long as max_num_batched_tokens takes."""
    cpu_linears: Literal["full", "int8"] = "full"
    """On a CPU, how linears compute: in the data type, or with weights and activations in 8 bits (int8_linear.py)."""
    overlap_steps: Literal["auto", "on", "off"] = "auto"
    """Start each step while the one before it is computed, so that a device never waits for the host. auto: where the
    device computes by itself, a GPU; on a CPU it only delays each token by a step."""
    enforce_eager: bool = False
    """Launch decode steps kernel by kernel instead of as one graph (of CUDA's on a GPU, of recorded calls on a CPU): no
    capture, slower steps."""
    deterministic: bool = False
    """fp32 with fixed tiles: a request's tokens do not depend on what else runs."""
    simulated_prefill_tokens_per_second: float = 20_000.0
    simulated_step_seconds: float = 0.01
    simulated_fault: str | None = None
    """TOKEN:KIND, a fault for tests (simulated/faults.py). The model's own engine refuses it."""

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32, 64, 128):
            raise ValueError(f"block size must be 16, 32, 64 or 128, not {self.block_size}")
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            raise ValueError(
                f"kv_cache_dtype must be one of {', '.join(get_args(KVCacheDtype))}, not {self.kv_cache_dtype}"
            )
        stride_tokens = self.index_stride_tokens
        if stride_tokens is not None and (stride_tokens < 1 or stride_tokens % self.block_size):
            raise ValueError(
                f"index_stride_tokens must be a positive multiple of the block size {self.block_size}, "
                f"not {stride_tokens}"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}")
        if not 0.0 <= self.spared_cache_share < 1.0:
            raise ValueError(f"spared_cache_share must be in [0, 1), not {self.spared_cache_share}")
        for name in ("swap_space_gib", "host_cache_gib", "max_preemptions", "mixed_step_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must not be negative, not {value}")
        if not 0 < self.priority_ageing_seconds < math.inf:
            raise ValueError(f"priority_ageing_seconds must be above 0, not {self.priority_ageing_seconds}")
        if self.preempt not in get_args(PreemptionMode):
            raise ValueError(
                f"preempt must be one of {', '.join(get_args(PreemptionMode))}, not {self.preempt}"
            )
        if self.preempt == "swap" and self.swap_space_gib == 0:
            raise ValueError("preempt swap needs swap space (--swap-space-gib)")
        if self.simulated_prefill_tokens_per_second <= 0 or self.simulated_step_seconds < 0:
            raise ValueError("the simulated engine's rates must be positive")
        if self.simulated_fault is not None:
            SimulatedFault.parse(self.simulated_fault)
            if self.engine != "simulated":
                raise ValueError("simulated_fault is for the simulated engine alone")

    @property
    def index_stride_blocks(self) -> int:
        return 1 if self.index_stride_tokens is None else self.index_stride_tokens // self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker process: its engine, its place in the cluster, and where it listens."""

    engine: EngineConfig
    worker_id: str = "worker-0"
    cluster: str = "default"
    cluster_secret: str = field(default="", repr=False)
    """Shared by routers and workers of a cluster; every session must show it."""
    session_tls: SessionTls | None = None
    """None: certificates that follow from the cluster secret, or plaintext without one."""
    host: str = "127.0.0.1"
    """The interface to bind, and the name under which routers reach it unless `advertise_host` says otherwise."""
    advertise_host: str | None = None
    port: int = 0
    """0 takes a free one."""
    redis_url: str | None = field(default=None, repr=False)
    """None: serve without the prefix index."""
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    metrics_port: int | None = None
    """Prometheus endpoint; 0 takes a free port, None has none."""
    metrics_names: MetricNames = "blockyard"
    """`vllm` adds vLLM's names at that endpoint."""
    model_name: str = ""
    """The model's id for clients, as metrics label it. Empty: model_files.py names it."""
    max_waiting: int = DEFAULT_MAX_WAITING
    """Requests that wait inside the worker; beyond it they are rejected as busy, and the router keeps them."""
    pool_map_path: str | None = None
    """A file that shows the block pool as text, rewritten each second."""
    stall_seconds: float = DEFAULT_STALL_SECONDS
    """A worker whose engine has had work for so long without finishing a step ends itself, to be started afresh.
    It must be longer than the longest step of the model."""
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    """At the end what runs has so long to finish; then it goes on on other workers."""

    log: LogConfig = field(default_factory=LogConfig)
    """Of an actor; a process of its own has the environment's."""

    def __post_init__(self) -> None:
        check_worker_limits(lease_seconds=self.lease_seconds, max_waiting=self.max_waiting)
        if not self.stall_seconds > 0:
            raise ValueError(f"stall_seconds must be above 0, not {self.stall_seconds:g}")
        if not 0 <= self.grace_seconds < math.inf:
            raise ValueError(f"grace_seconds must be finite and not negative, not {self.grace_seconds:g}")
        if self.host in ("0.0.0.0", "::") and self.advertise_host is None:
            raise ValueError(
                f"host {self.host} binds every interface: say with advertise_host where routers find it"
            )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one option for each field of EngineConfig, with its default."""
    choices: dict[str, tuple[Any, ...]] = {
        "engine": ("model", "simulated"),
        "device": ("auto", "cpu", "cuda"),
        "dtype": ("auto", "float32", "bfloat16", "float16"),
        "kv_cache_dtype": get_args(KVCacheDtype),
        "load_format": ("auto", "random"),
        "block_size": (16, 32, 64, 128),
        "cpu_linears": ("full", "int8"),
        "overlap_steps": ("auto", "on", "off"),
        "preempt": get_args(PreemptionMode),
    }
    kinds: dict[str, type] = {
        "index_stride_tokens": int,
        "max_model_len": int,
        "kv_cache_memory": int,
        "swap_space_gib": float,
        "simulated_fault": str,
        "tokenizer": str,
    }
    for setting in fields(EngineConfig):
        option = "--" + setting.name.replace("_", "-")
        if setting.name == "model":
            parser.add_argument(option, required=True)
        elif setting.default is False:
            parser.add_argument(option, action="store_true")
        else:
            kind = kinds.get(setting.name, type(setting.default))
            parser.add_argument(
                option,
                type=kind,
                default=setting.default,
                choices=choices.get(setting.name),
                help="default: %(default)s",
            )


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's settings out of parsed options."""
    return EngineConfig(
        **{setting.name: getattr(arguments, setting.name) for setting in fields(EngineConfig)}
    )
