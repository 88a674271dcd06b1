"""Builds our engine alone from its parts: a model folder, a kernel backend by name, and a pool of given size.

Unlike worker/startup/loading.py, it chooses a backend by name, so that two of them can run side by side.
"""

import atexit
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from blockyard.kernels.interface import Backend
from blockyard.kernels.selection import choose_backend
from blockyard.proto.naming.block_hash import chain, root_name
from blockyard.worker.config import EngineConfig
from blockyard.worker.engine import Engine
from blockyard.worker.engine_types import EngineRequest
from blockyard.worker.execution.runner import TorchRunner
from blockyard.worker.execution.step_graphs import sizes_for
from blockyard.worker.memory.kv_size import KVCacheDtype, bytes_per_block, stored_dtype
from blockyard.worker.model.config import load_config
from blockyard.worker.model.weights import load_weights, random_weights
from blockyard.worker.scheduling.scheduler import SchedulerConfig
from blockyard.worker.sequences.identifiers import BlockName
from blockyard.worker.sequences.sampling_params import SamplingParams
from blockyard.worker.startup.loading import load_engine
from blockyard.worker.startup.warm_up import try_out

BLOCK_SIZE = 16
MIXED_STEP_SECONDS = 0.2
"""Time that prompts may add to a step with decodes: a worker's default."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROOT = root_name(cluster_secret="", model_fingerprint="bench", block_size=BLOCK_SIZE, kv_dtype="bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    model: str
    dtype: str
    device: str
    backend: str = "auto"
    """A backend's name; `cpu-int8` is the cpu backend with its linears in 8 bits."""
    kv_bytes: int
    least_blocks: int = 0
    """Minimum blocks of the pool, even if they take more than `kv_bytes`."""
    kv_cache_dtype: KVCacheDtype = "auto"
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    threads: int = 0
    """Number of torch's threads. 0 keeps torch's default."""
    ranks: int = 1
    """Processes that share the model. The threads and the memory are divided among them."""


def build_engine(settings: EngineSettings) -> Engine:
    """Build a warm engine, as a worker has it: kernels are compiled, rates are measured, and graphs are captured.

    On a GPU, steps overlap. A folder without weights gets random ones.
    """
    if settings.ranks > 1:
        return _divided_engine(settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    folder, device, dtype = Path(settings.model), torch.device(settings.device), DTYPES[settings.dtype]
    config = load_config(folder)
    has_weights = any(folder.glob("*.safetensors"))
    weights = (
        load_weights(folder, config, dtype=dtype, device=device)
        if has_weights
        else random_weights(config, dtype, device, seed=0)
    )
    block_bytes = bytes_per_block(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        kv_dtype=stored_dtype(settings.kv_cache_dtype, settings.dtype),
    )
    num_blocks = max(settings.kv_bytes // block_bytes, settings.least_blocks)
    runner = TorchRunner(
        config=config,
        weights=weights,
        backend=backend_of(settings.backend, device),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    runner.warm_up()
    is_cuda = device.type == "cuda"
    sizes = sizes_for(runner.backend, device, settings.max_num_seqs)
    if sizes is not None:
        runner.capture_decodes(sizes, max_context_tokens=settings.max_model_len)
    engine = Engine(
        SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
        ),
        runner,
        num_blocks=num_blocks,
        bytes_per_block=block_bytes,
        mixed_step_seconds=MIXED_STEP_SECONDS,
        overlap_steps=is_cuda,
    )
    try_out(engine)
    return engine


def _divided_engine(settings: EngineSettings) -> Engine:
    """Build a warm engine of several ranks, as a worker has it. The other ranks end with this process."""
    config = EngineConfig(
        model=settings.model,
        dtype=settings.dtype,
        device=settings.device,
        load_format="auto" if any(Path(settings.model).glob("*.safetensors")) else "random",
        kv_cache_memory=settings.kv_bytes // settings.ranks,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        mixed_step_seconds=MIXED_STEP_SECONDS,
        tensor_parallel_size=settings.ranks,
    )
    if settings.threads:
        os.environ["OMP_NUM_THREADS"] = str(max(1, settings.threads // settings.ranks))
    # Ranks prove themselves with certificates. An engine alone runs without that package.
    from blockyard.worker.ranks import RankLeader

    leader = RankLeader(config, secret="", cluster="bench")
    atexit.register(leader.close)
    leader.spawn()
    engine = load_engine(config, leader.connect()).engine
    try_out(engine)
    return engine


def backend_of(name: str, device: torch.device) -> Backend:
    """Return the backend with a name such as `cpu` or `cpu-int8`. Raise ValueError if it is not available."""
    requested, _, linears = name.partition("-")
    return choose_backend(device, requested=requested, **({"linears": linears} if linears else {}))


def engine_request(token_ids: list[int], max_tokens: int, *, salt: str = "") -> EngineRequest:
    """Make a greedy request that no token ends. Requests with different salts share no cached prefix."""
    root = BlockName(_ROOT) if not salt else BlockName(_salted(salt))
    names = chain(root, token_ids, BLOCK_SIZE)
    return EngineRequest(
        token_ids=token_ids,
        prompt_length=len(token_ids),
        names=[root, *(BlockName(name) for name in names)],
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )


def _salted(salt: str) -> bytes:
    return root_name(cluster_secret=salt, model_fingerprint="bench", block_size=BLOCK_SIZE, kv_dtype="bench")
