"""Options of a request, for `generate` and `chat`. Their names are the client's arguments.

Owns how an option's text becomes an argument of the client. An omitted option means the server's default. The server
checks ranges.
"""

from collections.abc import Callable
from pathlib import Path

import click
from blockyard.deploy.settings.options import Command
from blockyard.router.client.arguments import EarlyStopping

_EARLY_STOPPING: dict[str, EarlyStopping] = {"heuristic": False, "first": True, "never": "never"}


def sampling_options(command: Command) -> Command:
    """Add the sampling options of one output, and the time limit."""
    return _with_options(
        command,
        click.option(
            "--max-tokens", type=int, default=256, show_default=True, help="Maximum tokens to generate."
        ),
        click.option(
            "--min-tokens",
            type=int,
            help="Tokens before which no end of sequence and no stop token is sampled.",
        ),
        click.option(
            "--ignore-eos", is_flag=True, default=None, help="Continue past the end of the sequence."
        ),
        click.option(
            "--temperature",
            type=float,
            help="Randomness of sampling. 0 always takes the most likely token. Default: the model's own, else 1.",
        ),
        click.option("--top-k", type=int, help="Sample among this many most likely tokens. 0: all."),
        click.option(
            "--top-p", type=float, help="Sample among the fewest tokens whose probabilities reach this sum."
        ),
        click.option(
            "--min-p",
            type=float,
            help="Exclude tokens below this share of the most likely token's probability.",
        ),
        click.option(
            "--presence-penalty",
            type=float,
            help="Subtracted once from the logit of each token in the output.",
        ),
        click.option(
            "--frequency-penalty",
            type=float,
            help="Subtracted from a token's logit for each time in the output.",
        ),
        click.option(
            "--repetition-penalty",
            type=float,
            help="Above 1: tokens of prompt and output become less likely.",
        ),
        click.option(
            "--logit-bias",
            multiple=True,
            callback=_logit_bias,
            metavar="ID=VALUE",
            help="Added to the logit of token ID, from -100 to 100. May be given more than once.",
        ),
        _token_ids(
            "--allowed-token-id", "allowed_token_ids", "A token that may be sampled; all others are excluded"
        ),
        _token_ids("--bad-token-id", "bad_token_ids", "A token that is never sampled"),
        click.option(
            "--bad-word",
            "bad_words",
            multiple=True,
            help="A word of one token that is never sampled. May be given more than once.",
        ),
        click.option(
            "--seed",
            type=int,
            help="Seed of sampling. The same seed repeats the output. Default: a random one.",
        ),
        click.option(
            "--stop", multiple=True, help="A text that ends the output. May be given more than once."
        ),
        _token_ids("--stop-token-id", "stop_token_ids", "A token that ends the output"),
        click.option(
            "--include-stop",
            "include_stop_in_output",
            is_flag=True,
            default=None,
            help="Keep the stop string or stop token at the end of the output.",
        ),
        click.option(
            "--skip-special-tokens/--keep-special-tokens",
            default=None,
            help="Leave special tokens out of the text, or keep them.  [default: skip]",
        ),
        click.option("--priority", type=int, help="Priority from -100 to 100. Lower is served earlier."),
        click.option("--tenant", help="Tenant of the request. Each tenant has a fair share."),
        click.option(
            "--session-id",
            help="Name of a conversation. Its requests prefer the worker that served it before.",
        ),
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
    """Add the options of a single request beyond one plain output."""
    return _with_options(
        command,
        click.option("--n", type=int, help="Number of outputs."),
        click.option("--beam-width", type=int, help="Search with this many beams instead of sampling."),
        click.option("--length-penalty", type=float, help="Beam search: above 0 favours longer beams."),
        click.option(
            "--early-stopping",
            type=click.Choice(list(_EARLY_STOPPING)),
            callback=_early_stopping,
            help="When a search with enough finished beams ends. `first`: at once. `heuristic` (default): once better "
            "beams are unlikely. `never`: only once they are impossible.",
        ),
        click.option(
            "--logprobs",
            type=int,
            help="Most likely tokens to report with each token. Shown with --output json.",
        ),
        click.option(
            "--prompt-logprobs",
            type=int,
            help="The same for each token of the prompt, which then reuses no cache. Shown with --output json.",
        ),
        click.option(
            "--json-schema",
            callback=text_or_file,
            metavar="TEXT|@FILE",
            help="Force the output to be JSON of this schema.",
        ),
        click.option(
            "--json-object",
            is_flag=True,
            default=None,
            help="Force the output to be a JSON object of any kind.",
        ),
        click.option("--regex", help="Force the output to match this regular expression."),
        click.option(
            "--truncate-prompt-tokens",
            type=int,
            help="Keep only this many tokens at the end of the prompt. -1: as many as leave room for --max-tokens.",
        ),
        click.option("--cache-salt", help="Share cached prefixes only with requests of the same salt."),
        click.option(
            "--public-prefix",
            is_flag=True,
            default=None,
            help="Share the prompt's prefixes with all tenants. Without it they stay within this token's tenant.",
        ),
        click.option("--request-id", help="Name of the request, for an abort. Default: a random one."),
    )


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


def _token_ids(flag: str, argument: str, told: str) -> Callable[[Command], Command]:
    return click.option(flag, argument, type=int, multiple=True, help=f"{told}. May be given more than once.")


def _with_options(command: Command, *adds: Callable[[Command], Command]) -> Command:
    for add in reversed(adds):
        command = add(command)
    return command
