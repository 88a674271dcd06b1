"""Options of `up` that follow from the fields of EngineConfig, RouterConfig and the limits.

Owns which fields are options, and in which section of the configuration file. Flags, defaults and help come from the
fields (worker/config.py, router/config.py).
"""

from collections.abc import Mapping
from typing import Any

import click
from blockyard.deploy.settings.options import DEMO_MODEL, at_revision, model_path
from blockyard.deploy.settings.setting import Command, field_setting, field_settings, own_option, taken
from blockyard.proto.runtime.settings import setting_field
from blockyard.router.config import RouterConfig, RouterLimits
from blockyard.router.placement.config import PlacementConfig
from blockyard.worker.config import EngineConfig, WorkerLimits

OWN_SETTINGS = (
    "dtype",
    "max_model_len",
    "tensor_parallel_size",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "host_cache_gib",
    "max_num_seqs",
    "max_num_batched_tokens",
    "speculation",
    "draft_model",
    "max_loras",
    "max_lora_rank",
    "adapter_dir",
)
"""Fields of EngineConfig that a model which is added to a cluster may have of its own."""
_OWN: Mapping[str, Mapping[str, Any]] = {
    "draft_model": {"help": "As in `up`. Default: none.", "metavar": "MODEL", "parse": model_path},
    "max_loras": {"help": "As in `up`. Default: the cluster's, or 0 for a model without adapters."},
}


def engine_options(command: Command) -> Command:
    """Add an option for each field of EngineConfig; `engine_config` makes an EngineConfig of their values."""
    model_help = setting_field(EngineConfig, "model").description.help.removesuffix(".")
    # `up` itself reports a missing model: `config show` needs none.
    model = {"help": f"{model_help}, or `{DEMO_MODEL}`.", "required": False}
    return field_settings(EngineConfig, "engine", model=model)(command)


def own_engine_options(command: Command) -> Command:
    """Add the settings of the engine that a model may have of its own; `own_engine_settings` takes those given."""
    for name in reversed(OWN_SETTINGS):
        command = own_option(EngineConfig, name, **_OWN.get(name, {}))(command)
    return command


def own_engine_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings of `own_engine_options` from a command's arguments, and return those that were given."""
    own = {name: values.pop(name) for name in OWN_SETTINGS}
    return {name: value for name, value in own.items() if value is not None}


def limit_options(command: Command) -> Command:
    """Add an option for each field of RouterLimits and WorkerLimits."""
    return field_settings(RouterLimits, "limits")(field_settings(WorkerLimits, "worker")(command))


def engine_config(values: dict[str, Any]) -> EngineConfig:
    """Remove the engine's settings from a command's arguments, and return them.

    Raise ValueError for a wrong setting, and UsageError without a model.
    """
    if values["model"] is None:
        raise click.UsageError("Missing option '--model'.")
    values["model"] = at_revision(model_path(values["model"]), values.pop("revision", None))
    for other in ("tokenizer", "draft_model"):
        if values[other] is not None:
            values[other] = model_path(values[other])
    return taken(EngineConfig, values)


def placement_options(command: Command) -> Command:
    """Add the options of the placement policy and its settings."""
    add_settings = field_setting(
        RouterConfig, "placement", "placement", key="prices", pairs_of=PlacementConfig
    )
    add_pulls = field_setting(RouterConfig, "no_pull", "placement")
    return field_setting(RouterConfig, "policy", "placement")(add_pulls(add_settings(command)))
