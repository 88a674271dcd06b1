"""Options of `up` that follow from the fields of EngineConfig, RouterConfig and the limits.

Owns which fields are options, and in which section of the configuration file. Flags, defaults and help come from the
fields (worker/config.py, router/config.py).
"""

from typing import Any

import click
from blockyard.deploy.settings.options import DEMO_MODEL, at_revision, model_path
from blockyard.deploy.settings.setting import Command, field_setting, field_settings, taken
from blockyard.proto.runtime.settings import setting_field
from blockyard.router.config import RouterConfig, RouterLimits
from blockyard.router.placement.config import PlacementConfig
from blockyard.worker.config import EngineConfig, WorkerLimits


def engine_options(command: Command) -> Command:
    """Add an option for each field of EngineConfig; `engine_config` makes an EngineConfig of their values."""
    model_help = setting_field(EngineConfig, "model").description.help.removesuffix(".")
    # `up` itself reports a missing model: `config show` needs none.
    model = {"help": f"{model_help}, or `{DEMO_MODEL}`.", "required": False}
    return field_settings(EngineConfig, "engine", model=model)(command)


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
