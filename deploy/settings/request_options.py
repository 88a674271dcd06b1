"""Options of a request, for `generate` and `chat`. They follow from the client's arguments.

Owns how an option's text becomes an argument of the client. Names, types and help are GenerateArguments' own. An
omitted option means the server's default, except that --max-tokens has its own. The server checks ranges.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
from blockyard.deploy.settings.options import Command
from blockyard.router.client.arguments import EarlyStopping, GenerateArguments

_EARLY_STOPPING: dict[str, EarlyStopping] = {"heuristic": False, "first": True, "never": "never"}
_OF_ONE_ANSWER = frozenset(
    (
        *("n", "beam_width", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs"),
        *("json_schema", "json_object", "regex", "truncate_prompt_tokens"),
        *("cache_salt", "public_prefix", "request_id"),
    )
)
"""Arguments of `generate` that `chat` does not take."""
_FLAGS = {
    "allowed_token_ids": "--allowed-token-id",
    "bad_token_ids": "--bad-token-id",
    "bad_words": "--bad-word",
    "stop_token_ids": "--stop-token-id",
    "include_stop_in_output": "--include-stop",
    "skip_special_tokens": "--skip-special-tokens/--keep-special-tokens",
}
"""Flags that differ from the argument's name."""


def sampling_options(command: Command) -> Command:
    """Add the options that `generate` and `chat` share: sampling, tenant and time limit."""
    return _with_options(
        command,
        *_argument_options(_described() - _OF_ONE_ANSWER),
        click.option("--tenant", help="Tenant of the request. Each tenant has a fair share."),
        click.option(
            "--timeout",
            "timeout_seconds",
            type=float,
            default=120.0,
            show_default=True,
            help="Time limit in seconds for the whole answer.",
        ),
    )


def answer_options(command: Command) -> Command:
    """Add the options that only `generate` has, such as --n, --json-schema and --cache-salt."""
    return _with_options(command, *_argument_options(_OF_ONE_ANSWER))


def text_or_file(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Return an option's text, or the text of the file named after an `@`. For click's callback."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise click.BadParameter(f"{value[1:]} cannot be read: {error}") from error


def _early_stopping(
    context: click.Context, option: click.Parameter, name: str | None
) -> EarlyStopping | None:
    return None if name is None else _EARLY_STOPPING[name]


def _logit_bias(context: click.Context, option: click.Parameter, pairs: tuple[str, ...]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            token_id, bias = int(token), float(value)
        except ValueError:
            raise click.BadParameter(f"{pair!r} is not ID=VALUE, such as 42=-1.5") from None
        if token_id in biases:
            raise click.BadParameter(f"token {token_id} has two biases")
        biases[token_id] = bias
    return biases


def _described() -> frozenset[str]:
    """Return the names of the client's arguments that have a help text."""
    hints = get_type_hints(GenerateArguments, include_extras=True)
    return frozenset(name for name, hint in hints.items() if get_origin(hint) is Annotated)


def _argument_options(names: Iterable[str]) -> list[Callable[[Command], Command]]:
    hints = get_type_hints(GenerateArguments, include_extras=True)
    return [_argument_option(name, *get_args(hint)) for name, hint in hints.items() if name in names]


def _argument_option(name: str, hint: Any, help: str) -> Callable[[Command], Command]:
    """Return a decorator that adds the option of a client's argument.

    An option that is not given is None or empty, unless _SPECIAL has a default.
    """
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    attributes: dict[str, Any] = {"default": None}
    if bool in kinds:
        attributes |= {"is_flag": True}
    elif Sequence[int] in kinds or Sequence[str] in kinds:
        attributes = {"multiple": True, "type": int if Sequence[int] in kinds else str}
    else:
        attributes |= {"type": kinds[0]}
    flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
    return click.option(flag, name, help=help, **{**attributes, **_SPECIAL.get(name, {})})


_SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "max_tokens": {"default": 256, "show_default": True},
    "logit_bias": {"type": str, "multiple": True, "callback": _logit_bias, "metavar": "ID=VALUE"},
    "early_stopping": {
        "is_flag": False,
        "type": click.Choice(list(_EARLY_STOPPING)),
        "callback": _early_stopping,
    },
    "json_schema": {"is_flag": False, "type": str, "callback": text_or_file, "metavar": "TEXT|@FILE"},
}
"""Attributes of click options that do not follow from the argument's type."""


def _with_options(command: Command, *adds: Callable[[Command], Command]) -> Command:
    for add in reversed(adds):
        command = add(command)
    return command
