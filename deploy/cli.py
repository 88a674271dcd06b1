"""The `blockyard` command: gathers the commands of commands/.

Owns how an operator's mistake looks, and the exit codes:

- 0: done.
- 1: the command failed or was interrupted.
- 2: the command line or the configuration is wrong.

Commands ask a cluster through the public gRPC client. Only `serve`, `up`, `down`, `restart`, `scale`, `model`,
`status`, `export` and `doctor --address` need Ray or torch. A machine that only calls clusters installs `blockyard`
without extras. Commands that need more packages then say what to install.
"""

from collections import UserDict
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click
import grpc
from blockyard.deploy.machine.state import NoSuchClusterError, which
from blockyard.router.client import BlockyardError
from blockyard.router.client.connection import TOKEN_VARIABLE

COMMANDS = {
    **{name: f"commands.lifecycle.{name}" for name in ("serve", "up", "down", "restart")},
    "scale": "commands.administer.scale",
    "model": "commands.lifecycle.model",
    "status": "commands.status.status",
    **{name: f"commands.administer.{name}" for name in ("drain", "resume", "flush", "pull", "lora")},
    **{name: f"commands.inspect.{name}" for name in ("workers", "blocks", "index")},
    "logs": "commands.logs.logs",
    "top": "commands.watch.top",
    "open": "commands.open_page.open_page",
    "explain": "commands.inspect.explain",
    **{name: f"commands.generate.{name}" for name in ("generate", "chat")},
    "run-batch": "commands.batch.run_batch",
    "bench": "commands.bench.bench",
    "size": "commands.estimate.size_command",
    "figures": "commands.estimate.figures_command",
    "doctor": "commands.estimate.doctor",
    "config": "commands.configure.config",
    "export": "commands.configure.export",
    "token": "commands.tokens.token",
}
"""Module and attribute of each command, below blockyard.deploy."""
INSTALL_SERVE = "pip install '.[serve]' in a clone"
"""Blockyard is not on a package index. A package of that name there would belong to somebody else."""


class _Commands(click.Group):
    """Turns errors that an operator can act on into one line and exit code 1.

    Any other error is a bug, and keeps its traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # These are RuntimeErrors and an OSError too, but click handles them itself.
        except BlockyardError as error:
            raise click.ClickException(_with_hint(error)) from error
        except NoSuchClusterError as error:
            raise click.ClickException(_with_start_hint(error, ctx.invoked_subcommand)) from error
        except (ValueError, RuntimeError, OSError) as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            if _is_ours(error):
                raise
            if error.name == "matplotlib":
                raise click.ClickException("pictures need: pip install '.[plots]' in a clone") from error
            raise click.ClickException(f"this needs the packages of a server: {INSTALL_SERVE}") from error


def _with_hint(error: BlockyardError) -> str:
    """Return the error's text, with advice to give a token, or with the request's id to search logs for."""
    hint = ""
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        hint = f"\nThis cluster needs a token: set {TOKEN_VARIABLE}, or give --token-file (`blockyard token new`)."
    elif error.request_id:
        hint = f" (request {error.request_id})"
    return f"{error}{hint}"


def _with_start_hint(error: NoSuchClusterError, command: str | None) -> str:
    """Return the error's text, with the commands that start or find such a cluster, and other ways of `command`.

    `down` is not told of a start: a cluster that does not exist needs none before its end.
    """
    named = which(error.cluster)
    starts = [] if command == "down" else [f"`blockyard up --model MODEL{named}` starts it"]
    finds = f"`blockyard status --address HEAD:6379{named}` finds one that was started on another machine"
    ways = (*starts, finds, *getattr(error, "__notes__", ()))
    return f"{error}: {', '.join(ways)}"


def _absent(name: str) -> click.Command:
    """Return a stand-in for a command whose packages are not installed. It says what to install."""

    def tell(**_: object) -> None:
        raise click.ClickException(f"`blockyard {name}` needs the packages of a server: {INSTALL_SERVE}")

    help_text = f"Needs a server's packages: {INSTALL_SERVE}"
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(
        name, callback=tell, help=help_text, context_settings=settings, add_help_option=False
    )


def _is_ours(error: ModuleNotFoundError) -> bool:
    return (error.name or "").partition(".")[0] == "blockyard"


class _Loaded(UserDict[str, click.Command]):
    """Imports each command on first use. Importing all of them takes twice as long as most single commands."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in self.data:
            self.data[name] = _command(name, COMMANDS[name])
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _command(name: str, place: str) -> click.Command:
    module, _, attribute = place.rpartition(".")
    try:
        command: click.Command = getattr(import_module(f"blockyard.deploy.{module}"), attribute)
    except ModuleNotFoundError as error:
        if _is_ours(error):
            raise
        return _absent(name)
    return command


@click.group(cls=_Commands, commands=_Loaded(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="blockyard")
def main() -> None:
    """A distributed LLM serving cluster: gRPC routers, workers on Ray, one prefix index in Redis."""


if __name__ == "__main__":
    main()
