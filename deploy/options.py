"""Options that several commands share, and the engine's settings as options: one for each field of
EngineConfig."""

import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import click
from blockyard.deploy.size import parse_bytes
from blockyard.worker.config import EngineConfig

DEMO_MODEL = "demo"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
Command = TypeVar("Command", bound=Callable[..., Any])


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
        flag = "--" + setting.name.replace("_", "-")
        if setting.default is MISSING:
            add = click.option(flag, required=True, help="Model folder, hub name, or `demo`.")
        elif setting.name == "deterministic":
            add = click.option(
                flag, is_flag=True, default=False, help="Tokens that do not depend on what else runs."
            )
        elif setting.name == "kv_cache_memory":
            add = click.option(
                flag, default=None, callback=byte_size, metavar="SIZE", help="Of each worker, such as 2GiB."
            )
        else:
            kind = _parameter_type(hints[setting.name], setting.default)
            add = click.option(
                flag, type=kind, default=setting.default, show_default=setting.default is not None
            )
        command = add(command)
    return command


def engine_config(values: dict[str, Any]) -> EngineConfig:
    """Takes the engine's settings out of a command's arguments. Raises ValueError."""
    settings = {setting.name: values.pop(setting.name) for setting in fields(EngineConfig)}
    settings["model"] = model_path(settings["model"])
    return EngineConfig(**settings)


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


def sampling_options(command: Command) -> Command:
    """The sampling settings of one output; absent ones are the server's defaults."""
    return _with_options(
        command,
        click.option("--max-tokens", type=int, default=256, show_default=True),
        click.option("--min-tokens", type=int),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end of the sequence."),
        click.option("--temperature", type=float),
        click.option("--top-k", type=int),
        click.option("--top-p", type=float),
        click.option("--min-p", type=float),
        click.option("--presence-penalty", type=float),
        click.option("--frequency-penalty", type=float),
        click.option("--repetition-penalty", type=float),
        click.option("--seed", type=int),
        click.option(
            "--stop", multiple=True, help="A text that ends the output; may be given more than once."
        ),
        click.option(
            "--stop-token-id",
            "stop_token_ids",
            type=int,
            multiple=True,
            help="A token that ends the output; may be given more than once.",
        ),
        click.option("--priority", type=int, help="Lower is served earlier, -100 to 100."),
        click.option("--timeout", "timeout_seconds", type=float, default=120.0, show_default=True),
    )


def answer_options(command: Command) -> Command:
    """What a single request may ask for beyond one plain output."""
    return _with_options(
        command,
        click.option("--n", type=int, help="Outputs."),
        click.option("--beam-width", type=int, help="Search with so many beams instead of sampling."),
        click.option("--length-penalty", type=float, help="Of beams; above 0 favours longer ones."),
        click.option(
            "--logprobs", type=int, help="Likeliest tokens to name beside each; shown with --output json."
        ),
        click.option(
            "--json-schema",
            callback=text_or_file,
            metavar="TEXT|@FILE",
            help="The output is JSON of this schema.",
        ),
        click.option("--regex", help="The output matches this expression."),
    )


def text_or_file(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The callback of an option that is a text, or the file of one after an `@`."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise click.BadParameter(f"{value[1:]} cannot be read: {error}") from error


def _with_options(command: Command, *adds: Callable[[Command], Command]) -> Command:
    for add in reversed(adds):
        command = add(command)
    return command


def _parameter_type(hint: Any, default: Any) -> Any:
    """Choices for a literal of texts, the type beside None where that is the default, else the default's own type;
    EngineConfig checks the rest."""
    choices = get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        return click.Choice(choices)
    if default is None:
        return next(choice for choice in choices if choice is not NoneType)
    return type(default)
