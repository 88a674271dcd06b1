"""A running cluster as a configuration file, and the parts of that file beyond settings: its models and adapters.

Pure. `[[models]]` are models beside the first one, each with its own workers and settings, as `blockyard model add`
gives them. `[[adapters]]` are those of `blockyard lora add`. `up` and `serve` add both once the cluster serves. Does
not own the settings themselves (setting.py), nor reading the file (config_file.py). No secret is ever exported.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click
from blockyard.deploy.settings.config_options import OWN_SETTINGS
from blockyard.deploy.settings.effective import plain, source_of, table_defaults
from blockyard.deploy.settings.options import DEMO_MODEL, kept_model, model_path
from blockyard.deploy.settings.setting import Setting, masked, settings_of
from blockyard.proto.runtime.settings import setting_field
from blockyard.worker.config import EngineConfig

if TYPE_CHECKING:
    from blockyard.deploy.supervision.desired_state import DesiredState
    from blockyard.deploy.supervision.model_plans import ModelPlan

Table = TypeVar("Table")
Document = dict[str, dict[str, Any]]
"""Settings by section and key."""
_MODELS = frozenset(("model", "tokenizer", "draft_model"))
"""Keys whose values name models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedModel:
    """One model beside the first one of its cluster."""

    model: str
    names: tuple[str, ...] = ()
    tokenizer: str | None = None
    chat_template: str | None = field(default=None, repr=False)
    """Text of the template, not its file."""
    workers: int = 1
    cpus_per_worker: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its own settings of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedAdapter:
    """One LoRA adapter."""

    name: str
    path: str
    model: str = ""
    """Id of its model. Empty: the first one."""
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """Models and adapters that a cluster serves beside its first model."""

    models: tuple[AddedModel, ...] = ()
    adapters: tuple[AddedAdapter, ...] = ()


def additions_of(document: Mapping[str, Any]) -> Additions:
    """Return the additions in a configuration file. Raise ValueError for a wrong one."""
    return Additions(
        models=tuple(_model(table) for table in _tables(document, "models")),
        adapters=tuple(_checked(AddedAdapter, table, "adapters") for table in _tables(document, "adapters")),
    )


def _tables(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    tables = document.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{name} must be tables, [[{name}]]")
    return tables


def _model(table: dict[str, Any]) -> AddedModel:
    own = table.get("settings", {})
    if not isinstance(own, dict):
        raise ValueError("settings of [[models]] must be a table")
    for name, value in own.items():
        if name not in OWN_SETTINGS:
            raise ValueError(f"{name} is no setting that a model of [[models]] may have of its own")
        member = setting_field(EngineConfig, name)
        if not isinstance(value, member.kind | int):
            raise ValueError(f"{name} of [[models]] must be {member.kind.__name__}, not {value!r}")
        member.check(value, f"{name} of [[models]]")
    names = table.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("names of [[models]] must be a list of texts")
    return _checked(AddedModel, {**table, "names": tuple(names)}, "models")


def _fits(kind: Any, value: Any) -> bool:
    if kind in (str, str | None):
        return isinstance(value, str)
    if kind in (int, float | None):
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return is_number and value > 0
    return True


def _checked(owner: type[Table], table: dict[str, Any], called: str) -> Table:
    settings_class: Any = owner
    members = {member.name: member for member in fields(settings_class)}
    if unknown := sorted(table.keys() - members.keys()):
        raise ValueError(
            f"[[{called}]] has {unknown[0]}, which is no key there: choose from {', '.join(members)}"
        )
    for name, value in table.items():
        if not _fits(members[name].type, value):
            raise ValueError(f"{name} of [[{called}]] cannot be {value!r}")
    try:
        return owner(**table)
    except TypeError:
        missing = ", ".join(
            name for name in ("name", "path", "model") if name in members and name not in table
        )
        raise ValueError(f"[[{called}]] lacks {missing}") from None


def written_settings(context: click.Context) -> Document:
    """Return the settings of the command that runs that are no defaults, as a configuration file has them.

    A value with a password is None.
    """
    written: Document = {}
    for setting in settings_of(context.command):
        assert setting.name is not None
        value = plain(context.params.get(setting.name))
        if not setting.expose_value or source_of(context, setting) == "default" or value in (None, [], {}):
            continue
        if setting.takes_pairs:
            defaults = table_defaults(context, setting)
            value = {name: part for name, part in value.items() if defaults.get(name) != part}
        written.setdefault(setting.section, {})[setting.key] = _written(setting, value)
    return written


def _written(setting: Setting, value: Any) -> Any:
    if setting.is_secret and masked(value) != value:
        return None
    return kept_model(value) if setting.key in _MODELS else value


def as_config(desired: "DesiredState", adapters: Iterable[AddedAdapter] | None) -> str:
    """Return a running cluster as a configuration file, with which `up` starts the same one.

    `adapters` is None if no router could be asked for them. Then the file says so.
    """
    settings, plans, handle = (
        _copied(desired.handle.get("settings", {})),
        list(desired.further_models),
        desired.handle,
    )
    cluster, engine = settings.setdefault("cluster", {}), settings.setdefault("engine", {})
    cluster.pop("further_model", None)
    cluster["workers"] = desired.num_workers
    if handle.get("cpus_per_worker"):
        cluster["cpus_per_worker"] = handle["cpus_per_worker"]
    if not desired.serves_first:
        _begin_with(plans.pop(0), cluster, engine)
    for key, addresses in (
        ("router_port", [router for _, router, _ in desired.addresses]),
        ("http_port", [gateway for _, _, gateway in desired.addresses if gateway]),
    ):
        if len(ports := {int(address.rpartition(":")[2]) for address in addresses if address}) == 1:
            cluster[key] = ports.pop()
    return (
        "\n".join(_lines(settings, [_added(plan, handle.get("engine", {})) for plan in plans], adapters))
        + "\n"
    )


def _copied(settings: Mapping[str, Mapping[str, Any]]) -> Document:
    return {section: dict(values) for section, values in settings.items()}


def _begin_with(plan: "ModelPlan", cluster: dict[str, Any], engine: dict[str, Any]) -> None:
    """Put a further model in the place of the first one, which was removed."""
    for key in ("revision", "chat_template", "prefill_workers"):
        cluster.pop(key, None)
    for key in ("tokenizer", "draft_model"):
        engine.pop(key, None)
    engine |= {
        _key(name): value for name in OWN_SETTINGS if (value := getattr(plan.engine, name)) is not None
    }
    engine["model"] = _portable(plan.served.model)
    cluster |= {
        "model_name": list(plan.served.names),
        "workers": plan.num_workers,
        "cpus_per_worker": plan.num_cpus_per_worker,
    }
    if plan.served.tokenizer is not None:
        engine["tokenizer"] = plan.served.tokenizer
    if plan.served.chat_template is not None:
        cluster["chat_template"] = plan.served.chat_template


def _key(name: str) -> str:
    return setting_field(EngineConfig, name).flag.removeprefix("--").replace("-", "_")


def _portable(model: str) -> str:
    """Return a model's name or folder. The demo model lies in another folder on another machine."""
    return DEMO_MODEL if model == model_path(DEMO_MODEL) else model


def _added(plan: "ModelPlan", clusters_engine: Mapping[str, Any]) -> AddedModel:
    own = {name: getattr(plan.engine, name) for name in OWN_SETTINGS}
    usual = {**clusters_engine, "draft_model": None}
    return AddedModel(
        model=_portable(plan.served.model),
        names=plan.served.names,
        tokenizer=plan.served.tokenizer,
        chat_template=plan.served.chat_template,
        workers=plan.num_workers,
        cpus_per_worker=plan.num_cpus_per_worker or None,
        settings={
            name: value for name, value in own.items() if value is not None and value != usual.get(name)
        },
    )


def _lines(
    settings: Document, models: Iterable[AddedModel], adapters: Iterable[AddedAdapter] | None
) -> Iterator[str]:
    yield "# A cluster as `blockyard export` found it. `blockyard up --config FILE` starts the same one."
    if adapters is None:
        yield "# Its LoRA adapters are missing here, because no router named them."
    for section, values in sorted(settings.items()):
        if values:
            yield from ("", f"[{section}]")
        for key, value in sorted(values.items()):
            if value is None:
                yield f"# {key} is left out, because it holds a password: give it by its variable (docs/cli.md)"
            else:
                yield f"{key} = {_toml(value)}"
    for name, tables in (("models", models), ("adapters", adapters or ())):
        for table in tables:
            yield from ("", f"[[{name}]]")
            for member in fields(table):
                value = getattr(table, member.name)
                if value not in (None, "", (), {}):
                    yield f"{member.name} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml(name)} = {_toml(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
