"""The `blockyard` command: gathers what commands/ holds.

Owns how an operator's mistake looks and the exit codes: 0 done, 1 it could not be done or was interrupted, 2 the
command line or the configuration is wrong. What is done lives beside it; what is asked goes through the
public gRPC client, so that everything but `serve`, `up`, `down`, `restart`, `scale` and `status` needs neither Ray nor
torch.
"""

from typing import Any

import click
import grpc
from blockyard.deploy.commands.administer import drain, flush, resume
from blockyard.deploy.commands.ask import chat, generate
from blockyard.deploy.commands.bench import bench
from blockyard.deploy.commands.configure import config
from blockyard.deploy.commands.explain import explain
from blockyard.deploy.commands.lifecycle import down, restart, serve, status, up
from blockyard.deploy.commands.look import blocks, index, workers
from blockyard.deploy.commands.reckon import doctor, figures_command, size_command
from blockyard.deploy.commands.scale import scale
from blockyard.deploy.commands.watch import top
from blockyard.deploy.tokens import token
from blockyard.router.client import BlockyardError
from blockyard.router.client.connection import TOKEN_VARIABLE


class _Commands(click.Group):
    """Turns what an operator can act on into one line and exit code 1; anything else is a traceback on
    purpose."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise  # RuntimeErrors too, but click's own way to end
        except BlockyardError as error:
            raise click.ClickException(_told(error)) from error
        except (ValueError, RuntimeError, OSError) as error:
            raise click.ClickException(str(error)) from error


def _told(error: BlockyardError) -> str:
    """With what an operator does next: give a token, or look for the request in the logs."""
    hint = ""
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        hint = f"\nThis cluster wants a token: set {TOKEN_VARIABLE}, or give --token-file (`blockyard token new`)."
    elif error.request_id:
        hint = f" (request {error.request_id})"
    return f"{error}{hint}"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="blockyard")
def main() -> None:
    """A distributed LLM serving cluster: gRPC routers, workers on Ray, one prefix index in Redis."""


for command in (
    *(serve, up, down, restart, scale, status),
    *(drain, resume, flush),
    *(workers, top, blocks, index, explain),
    *(generate, chat, bench),
    *(size_command, figures_command, doctor, config, token),
):
    main.add_command(command)


if __name__ == "__main__":
    main()
