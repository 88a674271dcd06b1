"""Tokens and TLS on the command line: what `up` gives the routers, and what a command shows to them.

Owns options. Does not own what tokens mean (router/admission/auth.py), how they are made (tokens.py), nor how a client
connects (router/client/connection.py). A token is never an argument: those can be read by everybody on the machine.
"""

from dataclasses import dataclass
from typing import Any

import click
from blockyard.deploy.settings.config_file import config_option
from blockyard.deploy.settings.setting import Command, setting
from blockyard.proto.security.secret_files import read_secret_file
from blockyard.proto.security.tls import server_credentials, session_channels
from blockyard.proto.security.tls_files import ServerTls, SessionTls, server_tls, session_tls
from blockyard.router.admission.token_file import TokenFile
from blockyard.router.client import TlsOptions

_CONNECTION = "blockyard.connection"
"""Where click's context keeps what `connection_options` were given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions:
    """Of a cluster's ports. Files lie at the same path on every node that has a router or a worker."""

    auth_file: str | None = None
    tls: ServerTls | None = None
    session_tls: SessionTls | None = None

    def check(self) -> None:
        """Before anything starts. Raises ValueError for what routers or workers could not use."""
        if self.auth_file is not None and not TokenFile(self.auth_file).tokens:
            raise ValueError(
                f"auth file {self.auth_file} has no token, so that nobody could call the cluster: "
                f"`blockyard token new --auth-file {self.auth_file}` adds one"
            )
        server_credentials(self.tls)
        server_credentials(self.session_tls)
        session_channels(self.session_tls, secret="", cluster="")


def security_options(command: Command) -> Command:
    """Of `up`; `security` takes them back."""
    for flag, told in reversed(
        (
            (
                "--auth-file",
                "Tokens that clients must show (`blockyard token new`). Default: none, all may call all.",
            ),
            ("--tls-cert", "Serve clients over TLS, with this certificate."),
            ("--tls-key", "The key of --tls-cert."),
            ("--tls-client-ca", "Clients must show a certificate of this CA."),
            (
                "--session-tls-cert",
                "Between routers and workers, instead of the cluster secret: a certificate for blockyard-session.",
            ),
            ("--session-tls-key", "The key of --session-tls-cert."),
            ("--session-tls-ca", "The CA of --session-tls-cert, that signs for nothing else."),
        )
    ):
        add = setting("security", flag, type=click.Path(dir_okay=False, resolve_path=True), help=told)
        command = add(command)
    return command


def security(values: dict[str, Any]) -> SecurityOptions:
    """Takes the options out of a command's arguments. Raises ValueError."""
    return SecurityOptions(
        auth_file=values.pop("auth_file"),
        tls=server_tls(values.pop("tls_cert"), values.pop("tls_key"), values.pop("tls_client_ca")),
        session_tls=session_tls(
            values.pop("session_tls_cert"), values.pop("session_tls_key"), values.pop("session_tls_ca")
        ),
    )


def connection_options(command: Command) -> Command:
    """How to reach routers, for any command that calls one; `client_connection` has them. Each may come by the
    environment too: BLOCKYARD_ and the option's name."""
    for flag, is_flag, told in reversed(
        (
            ("--tls", True, "Reach routers over TLS."),
            ("--tls-ca", False, "Over TLS, trusting this CA alone."),
            ("--tls-cert", False, "A certificate to show, with --tls-key."),
            ("--tls-key", False, "The key of --tls-cert."),
            (
                "--token-file",
                False,
                "A file with the token to show. Default: that of BLOCKYARD_TOKEN, if set.",
            ),
            ("--plaintext-token", True, "Show the token without TLS too, where others may read it."),
        )
    ):
        command = setting(
            "client",
            flag,
            type=None if is_flag else click.Path(dir_okay=False),
            is_flag=is_flag,
            envvar="BLOCKYARD_" + flag.removeprefix("--").replace("-", "_").upper(),
            expose_value=False,
            callback=_keep,
            help=told,
        )(command)
    return config_option(command)


def client_connection() -> dict[str, Any]:
    """The arguments of Client that the current command was given. Raises ValueError."""
    given = click.get_current_context().meta.get(_CONNECTION, {})
    files = {name: given.get(f"tls_{name}") for name in ("ca", "cert", "key")}
    uses_tls = bool(given.get("tls")) or any(files.values())
    token_file = given.get("token_file")
    return {
        "tls": TlsOptions(**files) if uses_tls else None,
        "token": None if token_file is None else _read_token(token_file),
        "allow_plaintext_token": bool(given.get("plaintext_token")),
    }


def _keep(context: click.Context, option: click.Parameter, value: Any) -> None:
    context.meta.setdefault(_CONNECTION, {})[option.name] = value


def _read_token(path: str) -> str:
    try:
        token = read_secret_file(path, "token file")[0].decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token:
        raise ValueError(f"token file {path} holds no token")
    return token
