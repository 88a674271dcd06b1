"""Preflight: checks of an `up` before anything is started.

Owns the checks. Each error names the wrong value. Changes nothing, except that it binds each port for a moment. Checks
that need Ray run once Ray answers (shape.py, `check_reachable`).
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from blockyard.deploy.dashboard.metrics_tab import GRAFANA_VARIABLE
from blockyard.deploy.dashboard.start_hook import HOOK, HOOK_VARIABLE
from blockyard.deploy.lifecycle.serving import ClusterStartError
from blockyard.deploy.lifecycle.shape import shape_of
from blockyard.deploy.machine.shared_port import can_bind, next_free, reserved_port
from blockyard.deploy.settings.size import (
    CPU_PROCESS_BYTES,
    adapter_slots_bytes,
    draft_bytes_per_block,
    machine_memory_bytes,
    plain_or_quantised_bytes,
)
from blockyard.deploy.views.quantities import counted, format_bytes
from blockyard.proto.naming.model_files import resolve_tokenizer
from blockyard.proto.text import load_tokenizer
from blockyard.router.config import ServedModel
from blockyard.worker.config import EngineConfig
from blockyard.worker.memory.kv_size import (
    DTYPE_BYTES,
    KVSize,
    bytes_per_block,
    kv_size_in,
    stored_dtype,
)
from blockyard.worker.model.config import HUB_CONFIG_PATTERNS, ModelConfig, load_config, resolve_model
from blockyard.worker.model.data_type import ChosenDataType, dtype_of
from blockyard.worker.model.division import divide
from blockyard.worker.model.shards import check_shards
from blockyard.worker.startup.draft_vocabulary import check_fits

if TYPE_CHECKING:
    from blockyard.deploy.settings.wanted_cluster import UpOptions

Checked = TypeVar("Checked")
CPU_KV_CACHE_BYTES = 2**30
"""Default size of the KV cache on a CPU."""
_SERVED_ON = {"http_port": "HTTP", "router_port": "gRPC"}


def check(options: "UpOptions") -> None:
    """Raise ValueError for the first of the `problems`."""
    for _, detail in problems(options):
        raise ValueError(detail)


def problems(options: "UpOptions") -> Iterator[tuple[str, str]]:
    """Yield each problem that would prevent the start, as its subject and a message."""
    checks: tuple[tuple[str, Callable[[UpOptions], object]], ...] = (
        ("security", lambda options: options.security.check()),
        ("model", check_model),
        ("adapters", _check_adapters),
        ("workers", _check_workers),
        ("router port", _check_ports),
        ("metrics tab", _check_metrics_tab),
    )
    for subject, look in checks:
        try:
            look(options)
        except (ValueError, ClusterStartError, OSError) as error:
            yield subject, str(error)


def local_hardware(options: "UpOptions") -> tuple[tuple[float, ...], float]:
    """Return the CPUs of a local cluster's one node, and its number of GPUs."""
    cpus = (float(len(os.sched_getaffinity(0))),)
    if options.engine.device == "cpu":
        return cpus, 0.0
    import torch

    return cpus, float(torch.cuda.device_count())


def model_config(model: str) -> ModelConfig:
    """Load a model's configuration. Raise ValueError for a model that is not found or that the engine cannot run."""
    return load_config(resolve_model(model, patterns=HUB_CONFIG_PATTERNS))


def dtype_here(options: "UpOptions", config: ModelConfig, *, has_gpu: bool) -> ChosenDataType | None:
    """Return the workers' data type, or None if another machine's CPU decides.

    Raise ValueError for a --dtype that deterministic mode does not allow.
    """
    engine, on_cpu = options.engine, not has_gpu
    possible = {dtype_of(engine, config, on_cpu=on_cpu, has_bfloat16=has).name for has in (True, False)}
    if options.address is not None and len(possible) > 1:
        return None
    return dtype_of(engine, config, on_cpu=on_cpu)


def pool_of(options: "UpOptions", config: ModelConfig, *, has_gpu: bool) -> KVSize | None:
    """Return the size of each worker's KV cache, or None if its GPU's free memory or its CPU decides.

    Bytes are those of one rank. Raise ValueError where heads do not divide among ranks.
    """
    engine = options.engine
    if engine.kv_cache_memory is None and has_gpu:
        return None
    chosen = dtype_here(options, config, has_gpu=has_gpu)
    if chosen is None:
        return None
    block_bytes = bytes_per_block(
        num_layers=config.num_layers,
        num_kv_heads=divide(config, size=engine.tensor_parallel_size).config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=engine.block_size,
        kv_dtype=stored_dtype(engine.kv_cache_dtype, chosen.name),
    )
    budget_bytes = engine.kv_cache_memory or CPU_KV_CACHE_BYTES
    draft_bytes = 0
    if (draft := _draft_config(options)) is not None:
        draft_dtype = dtype_of(engine, draft, on_cpu=not has_gpu).name
        draft_bytes = draft_bytes_per_block(draft, block_size=engine.block_size, dtype=draft_dtype)
    return kv_size_in(
        budget_bytes,
        block_size=engine.block_size,
        block_bytes=block_bytes,
        draft_block_bytes=draft_bytes,
        max_num_seqs=engine.max_num_seqs,
    )


def _draft_config(options: "UpOptions") -> ModelConfig | None:
    """Return the draft model's configuration. None without one, and where only other machines may have it."""
    path = options.engine.draft_model
    if path is None or (options.address is not None and not Path(path).is_dir()):
        return None
    return of_draft(lambda: model_config(path))


def of_draft(check: Callable[[], Checked]) -> Checked:
    """Call a check of the draft model, and name the option where it raises ValueError."""
    try:
        return check()
    except ValueError as error:
        raise ValueError(f"--draft-model: {error}") from error


def crowding(options: "UpOptions") -> str | None:
    """Return a warning if workers on this machine get less than one CPU each by default."""
    if options.address is not None or options.cpus_per_worker is not None:
        return None
    (cpus,), num_gpus = local_hardware(options)
    shape = shape_of(options, (cpus,), num_gpus)
    if shape.num_cpus >= shape.num_ranks:
        return None
    if shape.num_ranks > 1:
        return (
            f"{shape.all_workers * shape.num_ranks} ranks share {counted(cpus, 'CPU')}, and each waits for the others "
            "of its worker at every layer: give each a CPU of its own (--workers, --tensor-parallel-size)"
        )
    return (
        f"{shape.all_workers} workers share {counted(cpus, 'CPU')}, {shape.num_cpus:.2g} of one each: "
        f"{counted(int(cpus), 'worker')} would have one each (--workers, --cpus-per-worker)"
    )


def check_reachable(other_hosts: int, *, has_private_redis: bool) -> None:
    """Raise ClusterStartError if workers may run on machines that cannot reach the index."""
    if has_private_redis and other_hosts:
        raise ClusterStartError(
            f"the Ray cluster has nodes on {counted(other_hosts, 'other machine')}, which cannot "
            "reach a private Redis on this machine's loopback: give --redis-url (BLOCKYARD_REDIS_URL)"
        )


def other_hosts() -> int:
    """Return the number of machines in the Ray cluster besides this one. This process must be a driver."""
    import ray

    here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return len({node["NodeManagerAddress"] for node in nodes if node["Alive"]} - {here, "127.0.0.1"})


def check_model(options: "UpOptions") -> None:
    """Raise ValueError for a model that is not found, that the engine cannot run, or that does not fit into memory.

    The context must fit into the KV cache too.
    """
    for one in options.each_model():
        check_one_model(one, has_gpu=one.engine.device != "cpu")
    if options.address is None and options.engine.engine == "model":
        _check_memory(options)


def check_one_model(options: "UpOptions", *, has_gpu: bool, is_downloaded: bool = False) -> None:
    """Raise ValueError if workers with these settings cannot serve the first model, as far as its files tell.

    A joined cluster's nodes may have a model that this machine does not have: then nothing is checked. Weights of a hub
    model are checked only if `is_downloaded`, and so is its draft model.
    """
    engine = options.engine
    if options.address is not None and not Path(engine.model).is_dir():
        return
    config = model_config(engine.model)
    context = engine.max_model_len or config.max_position_embeddings
    if context > config.max_position_embeddings:
        raise ValueError(f"max_model_len {context} is beyond the model's {config.max_position_embeddings}")
    if is_downloaded or Path(engine.model).is_dir():
        check_weights(engine)
    if _draft_config(options) is not None and (is_downloaded or _are_here(engine)):
        check_draft(engine)
    divide(config, size=engine.tensor_parallel_size)  # raises ValueError
    pool = pool_of(options, config, has_gpu=has_gpu)
    if pool is not None and pool.num_tokens < context:
        raise ValueError(
            f"the KV cache holds {pool.num_tokens} tokens, fewer than max_model_len {context}: give it more memory "
            "(--kv-cache-memory) or lower --max-model-len"
        )


def _check_adapters(options: "UpOptions") -> None:
    """Raise ValueError if workers of this machine cannot serve the adapters of --adapter-dir, with any of the models.

    On a joined cluster the folder is on the nodes, and workers there check it.
    """
    engine = options.engine
    if options.address is None and engine.max_loras and engine.adapter_dir is not None:
        from blockyard.worker.lora.peft import check_has_slots, check_serves_adapters  # it loads torch

        check_serves_adapters(model_config(engine.model), Path(engine.adapter_dir))
        for model in options.served_models[1:]:
            config = model_config(model.model)
            try:
                check_has_slots(config)
            except ValueError as error:
                raise ValueError(
                    f"{model.id}: {error}. --max-loras counts for each model: add this one later "
                    "(`blockyard model add`)"
                ) from None


def check_weights(engine: EngineConfig) -> None:
    """Raise ValueError if the headers of a model's weight files are wrong. The files must be on this machine."""
    if engine.engine == "model" and engine.load_format == "auto":
        folder = resolve_model(engine.model)
        check_shards(folder, load_config(folder))


def _are_here(engine: EngineConfig) -> bool:
    """Return whether a model, its draft model and its tokenizer are folders. Those on the hub are checked later."""
    folders = (engine.model, engine.draft_model, engine.tokenizer)
    return all(Path(folder).is_dir() for folder in folders if folder is not None)


def check_draft(engine: EngineConfig) -> None:
    """Raise ValueError if the draft model's weight files are wrong, or its tokens are not those of the served model.

    The files of both must be on this machine. Do nothing without a draft model.
    """
    name = engine.draft_model
    if name is None:
        return
    folder, served = of_draft(lambda: resolve_model(name)), resolve_model(engine.model)
    if engine.load_format == "auto":
        of_draft(lambda: check_shards(folder, load_config(folder)))
    check_fits(load_config(folder), load_config(served), folder, resolve_tokenizer(engine.tokenizer, served))


def check_tokenizer(model: ServedModel) -> None:
    """Raise ValueError if the tokenizer of a model cannot be loaded. Its files must be on this machine."""
    folder = resolve_tokenizer(model.tokenizer, resolve_model(model.model))
    try:
        load_tokenizer(folder, model.chat_template)
    except OSError as error:
        raise ValueError(f"{folder}: the tokenizer cannot be read") from error


def _check_memory(options: "UpOptions") -> None:
    """Raise ValueError if workers on CPUs do not fit into memory. Check no GPU: only its worker knows its memory."""
    cpus, num_gpus = local_hardware(options)
    shape = shape_of(options, cpus, num_gpus)
    needed_bytes, held = 0, []
    for one in options.each_model():
        config = model_config(one.engine.model)
        pool = pool_of(one, config, has_gpu=num_gpus > 0)
        if num_gpus or pool is None:
            return
        weights_bytes = weights_bytes_of(one.engine, config, on_cpu=True)
        item_bytes = DTYPE_BYTES[dtype_of(one.engine, config, on_cpu=True).name]
        slots_bytes = adapter_slots_bytes(config, one.engine.max_loras, one.engine.max_lora_rank, item_bytes)
        if (draft := _draft_config(one)) is not None:
            weights_bytes += weights_bytes_of(one.engine, draft, on_cpu=True)
        kv_bytes = pool.total_bytes + pool.draft_bytes
        rank_bytes = weights_bytes + kv_bytes + slots_bytes + CPU_PROCESS_BYTES
        needed_bytes += shape.num_workers * shape.num_ranks * rank_bytes
        slots = f"{format_bytes(slots_bytes)} of adapter slots, " if slots_bytes else ""
        held.append(
            f"{format_bytes(weights_bytes)} of weights, {slots}{format_bytes(kv_bytes)} of KV cache and "
            f"{format_bytes(CPU_PROCESS_BYTES)} of its own"
        )
    has_bytes = machine_memory_bytes()
    if needed_bytes > has_bytes:
        holder = "each" if shape.num_ranks == 1 else f"each of {shape.num_ranks} ranks"
        raise ValueError(
            f"{counted(shape.all_workers, 'worker')} would need {format_bytes(needed_bytes)}, and this "
            f"machine has {format_bytes(has_bytes)}: {holder} holds {' or '.join(dict.fromkeys(held))} "
            "(--kv-cache-memory, --workers)"
        )


def weights_bytes_of(engine: EngineConfig, config: ModelConfig, *, on_cpu: bool) -> int:
    """Compute the bytes of one rank's weights, without the copies that kernels make of some."""
    part = divide(config, size=engine.tensor_parallel_size).config
    item_bytes = DTYPE_BYTES[dtype_of(engine, config, on_cpu=on_cpu).name]
    return plain_or_quantised_bytes(part, item_bytes, on_cpu=on_cpu, deterministic=engine.deterministic)


def _check_workers(options: "UpOptions") -> None:
    if options.address is None:
        shape_of(options, *local_hardware(options))


def _check_ports(options: "UpOptions") -> None:
    """Raise ValueError for a host that is no address of this machine, or a router's port that is taken.

    Do nothing for a joined cluster, where Ray chooses the routers' nodes.
    """
    if options.address is not None:
        return
    try:
        with reserved_port(options.host, 0):
            pass
    except (ValueError, OSError):
        raise ValueError(f"--host {options.host} is no address of this machine") from None
    with ExitStack() as stack:
        for option, first in (("--router-port", options.router_port), ("--http-port", options.http_port)):
            for port in range(first, first + options.num_ports) if first else ():
                try:
                    stack.enter_context(reserved_port(options.host, port))
                except ValueError:
                    raise ValueError(f"{option}: {_taken(port)}") from None


def ports_moved(options: "UpOptions") -> tuple["UpOptions", list[str]]:
    """Replace default ports that are taken on this machine by free ones. Return the options and a warning for each.

    Raise ValueError if no port is free.
    """
    warnings, given_out = [], set[int]()

    def is_free(port: int) -> bool:
        return port not in given_out and can_bind(options.host, port)

    # Explicit ports come first, so that moved ports avoid them.
    for name in sorted(_SERVED_ON, key=lambda name: name in options.movable_ports):
        first = port = getattr(options, name)
        if not first:
            continue
        if name in options.movable_ports:
            port = next_free(first, options.num_ports, is_free)
        if port != first:
            warnings.append(f"port {first} is taken: {_SERVED_ON[name]} is served on {port}")
            options = replace(options, **{name: port})
        given_out.update(range(port, port + options.num_ports))
    return options, warnings


def _check_metrics_tab(options: "UpOptions") -> None:
    if not options.live_page_in_metrics_tab:
        return
    if options.address is not None:
        raise ValueError(
            "--live-page-in-metrics-tab is for a Ray that `up` starts, and --address names one that runs"
        )
    if GRAFANA_VARIABLE in os.environ:
        raise ValueError(
            f"--live-page-in-metrics-tab is for a Ray without Grafana, and {GRAFANA_VARIABLE} names one "
            f"({os.environ[GRAFANA_VARIABLE]}), which has that tab"
        )
    if os.environ.get(HOOK_VARIABLE, HOOK) != HOOK:
        raise ValueError(
            f"--live-page-in-metrics-tab needs the live page, and your own {HOOK_VARIABLE} replaces its hook"
        )


def _taken(port: int) -> str:
    with socket.socket() as probe:
        is_used = probe.connect_ex(("127.0.0.1", port)) == 0
    return f"port {port} is taken" if is_used else f"port {port} cannot be bound"
