"""Every setting of a worker, with its unit, in frozen values.

A field with a help text is an option of `python -m blockyard.worker`. The fields of EngineConfig and WorkerLimits are
settings of `blockyard up` too (proto/runtime/settings.py).
"""

import math
from dataclasses import asdict, dataclass, field
from os.path import isabs
from typing import Any, Literal

from blockyard.proto.metrics.readings import MetricNames
from blockyard.proto.roles import Role
from blockyard.proto.runtime.grace import DEFAULT_GRACE_SECONDS
from blockyard.proto.runtime.logs import LogConfig
from blockyard.proto.runtime.settings import Group, check_settings, described, parse_bytes, setting
from blockyard.proto.security.tls_files import SessionTls
from blockyard.worker.memory.kv_size import KVCacheDtype
from blockyard.worker.scheduling.preemption import PreemptionMode
from blockyard.worker.simulated.faults import SimulatedFault

EngineKind = Literal["model", "simulated"]
MODEL: Group = "Model"
MEMORY: Group = "Memory of each worker"
STEPS: Group = "Steps of each worker"
TESTS: Group = "For tests"
FAILURES: Group = "Failures"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's model, and its share of the machine. Raises ValueError for bad values."""

    model: str = field(
        metadata=described(
            "Model: a folder in Hugging Face format, or a hub name with or without `@REVISION`.", group=MODEL
        )
    )
    tokenizer: str | None = setting(
        None,
        help="Another folder or hub name, for the tokenizer and the chat template. Default: the model's.",
        group=MODEL,
    )
    engine: EngineKind = setting(
        "model",
        help="`simulated` keeps scheduler, block pool and cache, and replaces the model by a clock.",
        group=MODEL,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", help="`auto` takes a GPU if there is one.", group=MODEL
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        help="Data type of weights and KV cache. `auto`: the model config's type, or float32 on a CPU without "
        "instructions for that type.",
        group=MODEL,
    )
    kv_cache_dtype: KVCacheDtype = setting(
        "auto",
        help="Data type of keys and values; `auto` means --dtype. With `int8` or `fp8` (e4m3) the cache holds nearly "
        "twice the tokens of 16 bits, and a scale for each token and KV head.",
        group=MEMORY,
    )
    load_format: Literal["auto", "random"] = setting(
        "auto", help="`random` makes random weights from the config alone, for benchmarks.", group=MODEL
    )
    seed: int = setting(0, help="Seed of random weights.", group=MODEL)
    tensor_parallel_size: int = setting(
        1,
        help="Ranks of each worker. They share the model and its KV cache, on GPUs with one GPU each.",
        minimum=1,
        group=MODEL,
    )
    block_size: Literal[16, 32, 64, 128] = setting(
        16, help="Tokens in a block of KV cache: 16, 32, 64 or 128.", group=MEMORY
    )
    index_stride_tokens: int | None = setting(
        None,
        help="Step in tokens of the prefixes that the prefix index knows, a multiple of --block-size. A larger step "
        "means fewer entries and coarser hints. Default: one block, which is exact.",
        group=MEMORY,
    )
    max_num_seqs: int = setting(
        256, help="Maximum sequences that run at once on a worker.", minimum=1, group=STEPS
    )
    max_model_len: int | None = setting(
        None,
        help="Maximum tokens of prompt and output together. Default: the limit in the model's config.",
        minimum=1,
        group=MODEL,
    )
    max_num_batched_tokens: int = setting(
        2048, help="Maximum tokens that one step computes.", minimum=1, group=STEPS
    )
    gpu_memory_utilization: float = setting(
        0.9,
        help="Share of the GPU's memory that a worker may use: weights, the largest step (measured), and KV cache for "
        "the rest.",
        above=0,
        maximum=1,
        group=MEMORY,
    )
    kv_cache_memory: int | None = setting(
        None,
        help="Memory for the KV cache of each worker, such as 2GiB. Default: what --gpu-memory-utilization leaves; on "
        "a CPU 1 GiB.",
        parse=parse_bytes,
        metavar="SIZE",
        minimum=1,
        group=MEMORY,
    )
    swap_space_gib: float | None = setting(
        None,
        help="Host memory in GiB for the blocks of preempted sequences. Default: on a GPU 4 GiB, or a quarter of the "
        "available memory if that is less; on a CPU none.",
        minimum=0,
        below=math.inf,
        group=MEMORY,
    )
    host_cache_gib: float = setting(
        0.0,
        help="Host memory in GiB for prefixes that the KV cache evicts, and for those fetched from other workers. "
        "0: none, and nothing is fetched.",
        minimum=0,
        below=math.inf,
        group=MEMORY,
    )
    lend_share: float = setting(
        0.1,
        help="Share of the KV cache that may be held at once for other workers to fetch. 0: lend nothing.",
        minimum=0,
        below=1,
        group=MEMORY,
    )
    nixl: bool = setting(
        False,
        help="Read blocks of other workers by NIXL, such as over RDMA, where both have it. Needs blockyard[nixl], and "
        "blocks on the CPU. It has no TLS.",
        group=MEMORY,
    )
    verify_host_memory: bool = setting(
        False,
        help="Check by checksum that each block from host memory is unchanged. Waits for each copy. Always on with "
        "--deterministic.",
        group=MEMORY,
    )
    preempt: PreemptionMode = setting(
        "auto",
        help="What happens to the blocks of a preempted sequence: `swap` moves them to host memory and back, "
        "`recompute` computes them again. `auto` takes the faster way, by measured rates.",
        group=STEPS,
    )
    max_preemptions: int = setting(
        4,
        help="Maximum preemptions per sequence. After that it is never preempted again.",
        minimum=0,
        group=STEPS,
    )
    protected_cache_share: float = setting(
        0.05,
        help="Share of the KV cache that protects other tenants' cached blocks from one busy tenant.",
        minimum=0,
        below=1,
        group=MEMORY,
    )
    priority_ageing_seconds: float = setting(
        10.0,
        help="Waiting time in seconds that makes up for one step of priority.",
        above=0,
        below=math.inf,
        group=STEPS,
    )
    mixed_step_seconds: float = setting(
        0.2,
        help="Longest pause in seconds that a long prompt may cause between two tokens of a running sequence. 0: only "
        "--max-num-batched-tokens limits it.",
        minimum=0,
        below=math.inf,
        group=STEPS,
    )
    cpu_linears: Literal["full", "int8"] = setting(
        "full",
        help="Linear layers on a CPU. `int8`: weights and activations in 8 bits, which is faster, with an error of "
        "about 1 % in each. Weights of a quantised checkpoint stay as they are. Needs AVX-512 VNNI or AVX2.",
        group=MODEL,
    )
    overlap_steps: Literal["auto", "on", "off"] = setting(
        "auto",
        help="Start each step while the previous one runs, so that a GPU never waits for the host. `auto`: on a GPU. "
        "On a CPU it only delays each token by a step.",
        group=STEPS,
    )
    max_loras: int = setting(
        0,
        help="LoRA adapters that the device holds at once, and that one step can use. 0: no adapter is served.",
        minimum=0,
        maximum=256,
        group=MODEL,
    )
    max_lora_rank: int = setting(
        16, help="Largest rank of an adapter. Each slot has room for it.", minimum=1, maximum=512, group=MODEL
    )
    adapter_dir: str | None = setting(
        None,
        help="Folder on each worker in which adapters lie, in PEFT's format: a full path. --max-loras needs it, and "
        "nothing outside it is read.",
        group=MODEL,
    )
    speculation: Literal["off", "ngram"] = setting(
        "off",
        help="Guess next tokens, and verify several in one step. `ngram` guesses what followed the last tokens earlier "
        "in the same prompt or output, as in code edits and quotations. The tokens stay the same.",
        group=STEPS,
    )
    draft_model: str | None = setting(
        None,
        help="A smaller model with the same tokens, as a folder or hub name. Its vocabulary may be padded to another "
        "size. It guesses next tokens, and what repeats itself is guessed as with --speculation ngram. The tokens stay "
        "the same.",
        group=STEPS,
    )
    enforce_eager: bool = setting(
        False,
        help="Launch decode steps kernel by kernel, not as one graph (of CUDA on a GPU, of recorded calls on a CPU). "
        "Nothing is captured at start, and steps are slower.",
        group=MODEL,
    )
    deterministic: bool = setting(
        False,
        help="Make a request's tokens independent of other requests: fp32 with fixed tiles.",
        group=MODEL,
    )
    simulated_prefill_tokens_per_second: float = setting(
        20_000.0, help="Simulated engine: prompt tokens computed in a second.", above=0, group=TESTS
    )
    simulated_step_seconds: float = setting(
        0.01,
        help="Simulated engine: time of a step, in addition to its prompt tokens.",
        minimum=0,
        group=TESTS,
    )
    simulated_fault: str | None = setting(
        None,
        help="Simulated engine: TOKEN:KIND commits a fault at each prompt with that token. KIND is raise, nan, exit or "
        "hang.",
        group=TESTS,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        stride_tokens = self.index_stride_tokens
        if stride_tokens is not None and (stride_tokens < 1 or stride_tokens % self.block_size):
            raise ValueError(
                f"index_stride_tokens must be a positive multiple of the block size {self.block_size}, "
                f"not {stride_tokens}"
            )
        if self.preempt == "swap" and self.swap_space_gib == 0:
            raise ValueError("preempt swap needs swap space (--swap-space-gib)")
        if self.max_loras and self.adapter_dir is None:
            raise ValueError("max_loras needs a folder with adapters (--adapter-dir)")
        if self.adapter_dir is not None and not isabs(self.adapter_dir):
            raise ValueError(f"adapter_dir must be a full path, not {self.adapter_dir!r}")
        if self.draft_model is not None and self.engine == "simulated":
            raise ValueError("draft_model needs an engine with a model: a simulated engine computes none")
        if self.draft_model is not None and self.tensor_parallel_size > 1:
            raise ValueError("draft_model needs a worker of one rank (tensor_parallel_size 1)")
        if self.simulated_fault is not None:
            SimulatedFault.parse(self.simulated_fault)
            if self.engine != "simulated":
                raise ValueError("simulated_fault needs the simulated engine (--engine simulated)")

    @property
    def index_stride_blocks(self) -> int:
        return 1 if self.index_stride_tokens is None else self.index_stride_tokens // self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Settings of each worker, beside its engine, that `blockyard up` has too. Raises ValueError for bad values."""

    lease_seconds: float = setting(
        3.0,
        help="Time without a renewal after which the prefix index no longer believes that a worker is alive.",
        above=0,
        below=math.inf,
        group=FAILURES,
    )
    role: Role = setting(
        "both",
        help="Part of a request that the worker is meant for. `prefill`: long prompts, which other workers continue. "
        "`decode`: all but long prompts. A role never makes a request fail.",
    )
    max_waiting: int = setting(
        64,
        help="Maximum requests that wait inside a worker. More are rejected as busy and stay in the router.",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def as_settings(self) -> dict[str, Any]:
        """Return the limits as arguments of WorkerConfig."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(WorkerLimits):
    """One worker process: its engine, its cluster, and the address where it listens."""

    engine: EngineConfig
    worker_id: str = setting("worker-0", help="Name of the worker in its cluster.")
    cluster: str = setting("default", help="Name of the cluster.")
    cluster_secret: str = field(default="", repr=False)
    """Secret that the cluster's routers and workers share. It gives session certificates and proves the index entry."""
    session_tls: SessionTls | None = None
    """None: certificates derived from the cluster secret, or plaintext if there is no secret."""
    host: str = setting(
        "127.0.0.1", help="Interface to bind. Also the address for routers, unless --advertise-host is given."
    )
    advertise_host: str | None = setting(None, help="Address under which routers reach the worker.")
    port: int = setting(0, help="Port to listen on. 0 takes a free one.")
    transfer_port: int = setting(
        0, help="Port at which other workers fetch blocks from this one. 0 takes a free one.", minimum=0
    )
    redis_url: str | None = field(default=None, repr=False)
    """None: serve without the prefix index."""
    metrics_port: int | None = None
    """Prometheus endpoint. 0 takes a free port, None opens none."""
    metrics_names: MetricNames = setting(
        "blockyard", help="`vllm` adds vLLM's metric names at the Prometheus endpoint."
    )
    model_name: str = setting(
        "", help="The model's id for clients, as metrics label it. Default: as the router names the model."
    )
    index_model: str = setting(
        "",
        help="The model's id, in a cluster that serves several. Default: the worker serves the cluster's first model.",
        metavar="NAME",
    )
    """The model has a part of the prefix index under this name, where routers also find its workers."""
    pool_map_path: str | None = setting(
        None, help="File that shows the block pool as text, rewritten every second."
    )
    stall_seconds: float = setting(
        60.0,
        help="The worker exits when its engine has work but finishes no step for this time. It must be longer than the "
        "model's longest step.",
        above=0,
    )
    grace_seconds: float = setting(
        DEFAULT_GRACE_SECONDS,
        help="Time at SIGTERM for running requests to finish. After it they move to other workers.",
        minimum=0,
        below=math.inf,
    )
    log: LogConfig = field(default_factory=LogConfig)
    """Logging of the worker. A process of its own takes it from its options, or else from the environment."""

    def __post_init__(self) -> None:
        check_settings(self)
        if self.host in ("0.0.0.0", "::") and self.advertise_host is None:
            raise ValueError(
                f"host {self.host} binds every interface: set advertise_host to the address for routers"
            )
