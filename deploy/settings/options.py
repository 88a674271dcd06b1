"""Options that several commands share, and the engine's settings as options: one for each field of
EngineConfig, with its help. What a request may ask for is in request_options.py."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import click
from blockyard.deploy.machine.state import checked_name
from blockyard.deploy.ray.head import host_and_port
from blockyard.deploy.settings.setting import TESTS, checked_by, field_settings, setting, taken
from blockyard.deploy.settings.setting import Command as Command
from blockyard.deploy.settings.size import parse_bytes
from blockyard.proto.naming.model_files import OTHER_FORMATS
from blockyard.proto.runtime.grace import DEFAULT_GRACE_SECONDS, MAX_GRACE_SECONDS
from blockyard.router.placement.config import PlacementConfig, PolicyName, parse_placement
from blockyard.worker.config import EngineConfig

DEMO_MODEL = "demo"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")

ENGINE_HELP = {
    "model": "Model folder, hub name (with `@REVISION` if you like), or `demo`.",
    "tokenizer": "Another folder or hub name, for the tokenizer and the chat template. Default: the model's.",
    "engine": "`simulated` keeps scheduler, pool and cache, and replaces the model by a clock.",
    "device": "`auto` takes a GPU where there is one.",
    "dtype": "Of weights and KV cache. `auto`: what the model's config says, but float32 on a CPU without instructions "
    "for that.",
    "kv_cache_dtype": "What keys and values are kept in: `auto` as --dtype; `int8` or `fp8` (e4m3), with a scale for "
    "each token and kv head, for nearly twice the tokens of 16 bits.",
    "load_format": "`random` makes weights from the config alone: for benchmarks.",
    "seed": "Of random weights.",
    "block_size": "Tokens in a block of KV cache: 16, 32, 64 or 128.",
    "index_stride_tokens": "The prefix index knows prefixes in steps of so many tokens, a multiple of --block-size: "
    "fewer entries, coarser hints. Default: of one block, which is exact.",
    "max_num_seqs": "Sequences that run at once on a worker.",
    "max_model_len": "Tokens of prompt and output together. Default: what the model's config says.",
    "max_num_batched_tokens": "Token budget of one step.",
    "gpu_memory_utilization": "Share of the GPU's memory that a worker may take: weights, the largest step, which is "
    "measured, and for the rest KV cache.",
    "kv_cache_memory": "KV cache of each worker, such as 2GiB. Default: what --gpu-memory-utilization leaves; on a "
    "CPU 1 GiB.",
    "swap_space_gib": "Host memory for the blocks of preempted sequences, in GiB. Default: on a GPU 4 GiB, or a "
    "quarter of the available memory if that is less; on a CPU none.",
    "host_cache_gib": "Host memory for prefixes that the KV cache has evicted, in GiB. 0: none.",
    "verify_host_memory": "Check by checksum that a block which comes back from host memory is what went there, at the "
    "cost of time. Always on with --deterministic.",
    "preempt": "What becomes of the blocks of a preempted sequence: moved to host memory and back, or computed "
    "again. `auto` takes what is faster, by measured rates.",
    "max_preemptions": "How often one sequence may be preempted; then it is safe.",
    "spared_cache_share": "Of the KV cache: so much of what the others have cached no tenant's work takes, "
    "however much of it there is.",
    "simulated_fault": "TOKEN:raise, nan, exit or hang: what --engine simulated does to a prompt with that token. For "
    "tests of faults.",
    "priority_ageing_seconds": "So long a request waits until it passes younger ones that are one step of priority "
    "better.",
    "mixed_step_seconds": "The longest pause between two tokens of a running sequence that a long prompt beside it "
    "should cause, in seconds. 0: no limit beside --max-num-batched-tokens.",
    "cpu_linears": "On a CPU, `int8` computes linears with weights and activations in 8 bits: faster, about 1 % of "
    "error in each. Needs AVX-512 VNNI or AVX2.",
    "overlap_steps": "Start each step while the one before it is computed, so that a GPU never waits for the host. "
    "`auto`: on a GPU; on a CPU it only delays each token by a step.",
    "enforce_eager": "Launch decode steps kernel by kernel instead of as one graph (of CUDA's on a GPU, of recorded "
    "calls on a CPU): no capture, slower steps.",
    "deterministic": "A request's tokens do not depend on what else runs: fp32 with fixed tiles.",
    "simulated_prefill_tokens_per_second": "Of the simulated engine: prompt tokens computed in a second.",
    "simulated_step_seconds": "Of the simulated engine: what a step takes besides its prompt tokens.",
}
"""By field of EngineConfig."""
_ENGINE_GROUPS = {
    "Model": (
        *("model", "tokenizer", "engine", "device", "dtype", "load_format", "seed", "max_model_len"),
        *("cpu_linears", "deterministic", "enforce_eager"),
    ),
    "Memory of each worker": (
        *("kv_cache_dtype", "block_size", "index_stride_tokens", "gpu_memory_utilization", "kv_cache_memory"),
        *("swap_space_gib", "host_cache_gib", "verify_host_memory", "spared_cache_share"),
    ),
    "Steps of each worker": (
        *("max_num_seqs", "max_num_batched_tokens", "mixed_step_seconds", "overlap_steps"),
        *("preempt", "max_preemptions", "priority_ageing_seconds"),
    ),
    TESTS: ("simulated_prefill_tokens_per_second", "simulated_step_seconds", "simulated_fault"),
}
"""Fields of EngineConfig by the group of their options. Help hides those of tests."""


def model_path(model: str) -> str:
    """A folder as an absolute path, for actors start elsewhere; `demo` as the model in this package; a hub
    name, with or without `@REVISION`, as it is. Raises ValueError for what can be none of them."""
    if model == DEMO_MODEL:
        return str(Path(__file__).parents[1].resolve() / "demo_model" / "checkpoint")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if folder.is_file() and folder.suffix in OTHER_FORMATS:
        raise ValueError(
            f"{folder} is a file, and a model is a folder: it holds {OTHER_FORMATS[folder.suffix]}"
        )
    if not _HUB_NAME.fullmatch(model):
        raise ValueError(f"model {model!r} is no folder here, and no hub name")
    return model


def at_revision(model: str, revision: str | None) -> str:
    """Append the revision to a hub model's name. Raises ValueError for a folder, which has none."""
    if revision is None:
        return model
    if Path(model).is_dir():
        raise ValueError("a revision is of a model on the hub, and this model is a folder")
    if "@" in model:
        raise ValueError(f"the model {model!r} names its revision already")
    return model_path(f"{model}@{revision}")


def ray_address(address: str) -> str:
    """Raises ValueError."""
    host_and_port(address)
    return address


def served_names(model: str) -> tuple[str, ...]:
    """The demo's folder says nothing of what it is."""
    return (DEMO_MODEL,) if model == DEMO_MODEL else ()


def engine_options(command: Command) -> Command:
    """Adds `--block-size` and all the others; `engine_config` takes them back."""
    special: dict[str, dict[str, Any]] = {
        name: {"group": group, "hidden": group == TESTS}
        for group, names in _ENGINE_GROUPS.items()
        for name in names
    }
    special["kv_cache_memory"] |= {"type": str, "callback": checked_by(parse_bytes), "metavar": "SIZE"}
    # `up` itself says that a model is missing: `config show` may do without.
    special["model"] |= {"type": str}
    return field_settings(EngineConfig, "engine", ENGINE_HELP, **special)(command)


def engine_config(values: dict[str, Any]) -> EngineConfig:
    """Takes the engine's settings out of a command's arguments. Raises ValueError, and click's error without a
    model."""
    if values["model"] is None:
        raise click.UsageError("Missing option '--model'.")
    tokenizer = values["tokenizer"]
    found = {
        "model": at_revision(model_path(values["model"]), values.pop("revision", None)),
        "tokenizer": None if tokenizer is None else model_path(tokenizer),
    }
    config: EngineConfig = taken(EngineConfig, {**values, **found})
    for field in fields(EngineConfig):
        del values[field.name]
    return config


def placement_options(command: Command) -> Command:
    """How routers choose a worker, and with what settings."""
    add_settings = setting(
        "placement",
        "--placement",
        key="prices",
        multiple=True,
        pair_names=[field.name for field in fields(PlacementConfig)],
        callback=checked_by(parse_placement),
        metavar="NAME=VALUE",
        help="A setting of placement, such as near_equal_ms=2; may be given more than once.",
    )
    add_policy = setting(
        "placement",
        "--policy",
        type=click.Choice(get_args(PolicyName)),
        default="prefix",
        show_default=True,
        help="How routers choose a worker: `prefix` by the estimated time to the first token, the others in simpler "
        "ways, to compare.",
    )
    return add_policy(add_settings(command))


def cluster_option(command: Command) -> Command:
    add = setting(
        "cluster",
        "--cluster",
        key="name",
        default="default",
        show_default=True,
        envvar="BLOCKYARD_CLUSTER",
        callback=checked_by(checked_name),
        help="The cluster's name.",
    )
    return add(command)


def router_option(command: Command) -> Command:
    add = setting(
        "client",
        "--router",
        "routers",
        multiple=True,
        envvar="BLOCKYARD_ROUTER",
        help="host:port of a router, instead of the cluster that `up` remembers here.",
    )
    return add(command)


def grace_option(command: Command) -> Command:
    add = click.option(
        "--grace-seconds",
        type=click.FloatRange(0, MAX_GRACE_SECONDS),
        default=DEFAULT_GRACE_SECONDS,
        show_default=True,
    )
    return add(command)


def output_option(command: Command) -> Command:
    add = click.option(
        "-o",
        "--output",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="`json` is for programs.",
    )
    return add(command)
