"""What `generate` and `chat` may ask of a request, as options: the names are the client's arguments.

Owns how an option's text becomes an argument of the client. What is left out is the server's default; ranges are the
server's to check.
"""

from collections.abc import Callable
from pathlib import Path

import click
from blockyard.deploy.settings.options import Command
from blockyard.router.client.arguments import EarlyStopping

_EARLY_STOPPING: dict[str, EarlyStopping] = {"heuristic": False, "first": True, "never": "never"}


def sampling_options(command: Command) -> Command:
    """The sampling settings of one output, and how long to wait for it."""
    return _with_options(
        command,
        click.option(
            "--max-tokens", type=int, default=256, show_default=True, help="Tokens to generate at most."
        ),
        click.option(
            "--min-tokens", type=int, help="No end of the sequence and no stop token before so many."
        ),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end of the sequence."),
        click.option(
            "--temperature",
            type=float,
            help="0 takes the likeliest token each time. Default: the model's own, else 1.",
        ),
        click.option("--top-k", type=int, help="Choose among so many likeliest tokens; 0: among all."),
        click.option(
            "--top-p", type=float, help="Choose among the fewest tokens that are so likely together."
        ),
        click.option(
            "--min-p", type=float, help="Leave out what is less likely than this share of the likeliest."
        ),
        click.option(
            "--presence-penalty", type=float, help="Off the logit of each token in the output, once."
        ),
        click.option("--frequency-penalty", type=float, help="The same, for each time that it is there."),
        click.option(
            "--repetition-penalty", type=float, help="Above 1: what prompt or output have is less likely."
        ),
        click.option(
            "--logit-bias",
            multiple=True,
            callback=_logit_bias,
            metavar="ID=VALUE",
            help="Added to the logit of token ID, -100 to 100; may be given more than once.",
        ),
        _token_ids(
            "--allowed-token-id", "allowed_token_ids", "A token that may be sampled, and no other may"
        ),
        _token_ids("--bad-token-id", "bad_token_ids", "A token that is never sampled"),
        click.option(
            "--bad-word",
            "bad_words",
            multiple=True,
            help="A word of one token that is never sampled; may be given more than once.",
        ),
        click.option(
            "--seed", type=int, help="The same seed samples the same way again. Default: a random one."
        ),
        click.option(
            "--stop", multiple=True, help="A text that ends the output; may be given more than once."
        ),
        _token_ids("--stop-token-id", "stop_token_ids", "A token that ends the output"),
        click.option(
            "--include-stop",
            "include_stop_in_output",
            is_flag=True,
            default=None,
            help="Keep the text of what ended the output at its end.",
        ),
        click.option(
            "--skip-special-tokens/--keep-special-tokens",
            default=None,
            help="Whether special tokens are left out of the text.  [default: skip]",
        ),
        click.option("--priority", type=int, help="Lower is served earlier, -100 to 100."),
        click.option("--tenant", help="Whose request it is: tenants get their turns and shares by name."),
        click.option(
            "--session-id",
            help="The conversation's name: its requests tend to the worker that has served it before.",
        ),
        click.option(
            "--timeout",
            "timeout_seconds",
            type=float,
            default=120.0,
            show_default=True,
            help="Seconds for the whole answer.",
        ),
    )


def answer_options(command: Command) -> Command:
    """What a single request may ask for beyond one plain output."""
    return _with_options(
        command,
        click.option("--n", type=int, help="Outputs."),
        click.option("--beam-width", type=int, help="Search with so many beams instead of sampling."),
        click.option("--length-penalty", type=float, help="Of beams; above 0 favours longer ones."),
        click.option(
            "--early-stopping",
            type=click.Choice(list(_EARLY_STOPPING)),
            callback=_early_stopping,
            help="When a search with enough finished beams ends: once the running ones are unlikely to get better "
            "(heuristic, the default), at once (first), or only when they cannot (never).",
        ),
        click.option(
            "--logprobs", type=int, help="Likeliest tokens to name beside each; shown with --output json."
        ),
        click.option(
            "--prompt-logprobs",
            type=int,
            help="The same beside each token of the prompt, which then reuses no cache; shown with --output json.",
        ),
        click.option(
            "--json-schema",
            callback=text_or_file,
            metavar="TEXT|@FILE",
            help="The output is JSON of this schema.",
        ),
        click.option(
            "--json-object", is_flag=True, default=None, help="The output is a JSON object of any kind."
        ),
        click.option("--regex", help="The output matches this expression."),
        click.option(
            "--truncate-prompt-tokens",
            type=int,
            help="Keep the last so many tokens of a longer prompt; -1: as many as leave room for --max-tokens.",
        ),
        click.option(
            "--cache-salt", help="Share cached prefixes only with requests that give the same salt."
        ),
        click.option(
            "--public-prefix",
            is_flag=True,
            default=None,
            help="Share the prompt's prefixes beyond this token's tenant, whose alone they are otherwise.",
        ),
        click.option(
            "--request-id", help="The request's name, by which it can be aborted. Default: a random one."
        ),
    )


def text_or_file(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The callback of an option that is a text, or the file of one after an `@`."""
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


def _token_ids(flag: str, argument: str, told: str) -> Callable[[Command], Command]:
    return click.option(flag, argument, type=int, multiple=True, help=f"{told}; may be given more than once.")


def _with_options(command: Command, *adds: Callable[[Command], Command]) -> Command:
    for add in reversed(adds):
        command = add(command)
    return command
