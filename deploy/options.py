"""Options that several commands share, and the engine's settings as options: one for each field of
EngineConfig, with its help. What a request may ask for is in request_options.py."""

import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import click
from blockyard.deploy.size import parse_bytes
from blockyard.router.placement_config import PlacementConfig, PolicyName, parse_placement
from blockyard.worker.config import EngineConfig

DEMO_MODEL = "demo"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
Command = TypeVar("Command", bound=Callable[..., Any])

ENGINE_HELP = {
    "model": "Model folder, hub name, or `demo`.",
    "engine": "`simulated` keeps scheduler, pool and cache, and replaces the model by a clock.",
    "device": "`auto` takes a GPU where there is one.",
    "dtype": "Of weights and KV cache. `auto`: what the model's config says.",
    "load_format": "`random` makes weights from the config alone: for benchmarks.",
    "seed": "Of random weights.",
    "block_size": "Tokens in a block of KV cache: 16, 32, 64 or 128.",
    "index_stride_tokens": "The prefix index knows prefixes in steps of so many tokens, a multiple of --block-size: "
    "fewer entries, coarser hints. Default: of one block, which is exact.",
    "max_num_seqs": "Sequences that run at once on a worker.",
    "max_model_len": "Tokens of prompt and output together. Default: what the model's config says.",
    "max_num_batched_tokens": "Token budget of one step.",
    "gpu_memory_utilization": "Share of the GPU's memory that weights and KV cache may take.",
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
    "deterministic": "A request's tokens do not depend on what else runs: fp32 with fixed tiles.",
    "simulated_prefill_tokens_per_second": "Of the simulated engine: prompt tokens computed in a second.",
    "simulated_step_seconds": "Of the simulated engine: what a step takes besides its prompt tokens.",
}
"""By field of EngineConfig."""


def byte_size(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """The callback of an option that is a size: `2GiB`, `500MB` or a number of bytes."""
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def model_path(model: str) -> str:
    """A folder as an absolute path, for actors start elsewhere; `demo` as the model in this package; a hub
    name as it is. Raises ValueError for what can be none of them."""
    if model == DEMO_MODEL:
        return str(Path(__file__).parent.resolve() / "demo_model" / "checkpoint")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    if not _HUB_NAME.fullmatch(model):
        raise ValueError(f"model {model!r} is no folder here, and no hub name")
    return model


def served_name(model: str) -> str | None:
    """The demo's folder says nothing of what it is."""
    return DEMO_MODEL if model == DEMO_MODEL else None


def engine_options(command: Command) -> Command:
    """Adds `--block-size` and all the others; `engine_config` takes them back."""
    hints = get_type_hints(EngineConfig)
    for setting in reversed(fields(EngineConfig)):
        flag, told = "--" + setting.name.replace("_", "-"), ENGINE_HELP.get(setting.name)
        if setting.default is MISSING:
            add = click.option(flag, required=True, help=told)
        elif setting.default is False:
            add = click.option(flag, is_flag=True, default=False, help=told)
        elif setting.name == "kv_cache_memory":
            add = click.option(flag, default=None, callback=byte_size, metavar="SIZE", help=told)
        else:
            kind = _parameter_type(hints[setting.name], setting.default)
            shows_default = setting.default is not None
            add = click.option(
                flag, type=kind, default=setting.default, show_default=shows_default, help=told
            )
        command = add(command)
    return command


def engine_config(values: dict[str, Any]) -> EngineConfig:
    """Takes the engine's settings out of a command's arguments. Raises ValueError."""
    settings = {setting.name: values.pop(setting.name) for setting in fields(EngineConfig)}
    settings["model"] = model_path(settings["model"])
    return EngineConfig(**settings)


def placement_options(command: Command) -> Command:
    """How routers choose a worker, and with what settings."""
    add_settings = click.option(
        "--placement",
        multiple=True,
        callback=_placement_config,
        metavar="NAME=VALUE",
        help="A setting of placement, such as near_equal_ms=2; may be given more than once.",
    )
    add_policy = click.option(
        "--policy",
        type=click.Choice(get_args(PolicyName)),
        default="prefix",
        show_default=True,
        help="How routers choose a worker: `prefix` by the estimated time to the first token, the others in simpler "
        "ways, to compare.",
    )
    return add_policy(add_settings(command))


def _placement_config(
    context: click.Context, option: click.Parameter, pairs: tuple[str, ...]
) -> PlacementConfig:
    try:
        return parse_placement(pairs)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def cluster_option(command: Command) -> Command:
    add = click.option(
        "--cluster",
        default="default",
        show_default=True,
        envvar="BLOCKYARD_CLUSTER",
        help="The cluster's name.",
    )
    return add(command)


def router_option(command: Command) -> Command:
    add = click.option(
        "--router",
        "routers",
        multiple=True,
        envvar="BLOCKYARD_ROUTER",
        help="host:port of a router, instead of the cluster that `up` remembers here.",
    )
    return add(command)


def output_option(command: Command) -> Command:
    add = click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
    return add(command)


def _parameter_type(hint: Any, default: Any) -> Any:
    """Choices for a literal of texts, the type beside None where that is the default, else the default's own type;
    EngineConfig checks the rest."""
    choices = get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        return click.Choice(choices)
    if default is None:
        return next(choice for choice in choices if choice is not NoneType)
    return type(default)
