"""Options of tokens and TLS: for the routers that `up` starts, and for the commands that call routers.

Does not own what tokens mean (router/admission/auth.py), how they are made (commands/tokens.py), nor how a client
connects (router/client/connection.py). A token is never an argument: every user of the machine can read arguments.
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
"""Key in click's context for the values of `connection_options`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions:
    """Tokens and TLS of a cluster's ports. Files have the same path on every node with a router or a worker."""

    auth_file: str | None = None
    tls: ServerTls | None = None
    session_tls: SessionTls | None = None

    def check(self) -> None:
        """Raise ValueError if routers or workers could not use the files, or if the auth file has no token."""
        if self.auth_file is not None and not TokenFile(self.auth_file).tokens:
            raise ValueError(
                f"auth file {self.auth_file} has no token, so that no client could call the cluster: "
                f"`blockyard token new --auth-file {self.auth_file}` adds one"
            )
        server_credentials(self.tls)
        server_credentials(self.session_tls)
        session_channels(self.session_tls, secret="", cluster="")


def security_options(command: Command) -> Command:
    """Add the options of tokens and TLS for `up`; `security` makes SecurityOptions of their values."""
    for flag, help in reversed(
        (
            (
                "--auth-file",
                "File of the tokens that clients must show (`blockyard token new`). Default: every client may call "
                "everything.",
            ),
            ("--tls-cert", "Serve clients over TLS with this certificate."),
            ("--tls-key", "Key of --tls-cert."),
            ("--tls-client-ca", "Clients must show a certificate of this CA."),
            (
                "--session-tls-cert",
                "Certificate for blockyard-session, between routers and workers, in place of the cluster secret.",
            ),
            ("--session-tls-key", "Key of --session-tls-cert."),
            ("--session-tls-ca", "CA of --session-tls-cert. It must sign nothing else."),
        )
    ):
        add = setting("security", flag, type=click.Path(dir_okay=False, resolve_path=True), help=help)
        command = add(command)
    return command


def security(values: dict[str, Any]) -> SecurityOptions:
    """Remove the options of `security_options` from a command's arguments, and return them.

    Raise ValueError if files that belong together are not all given.
    """
    return SecurityOptions(
        auth_file=values.pop("auth_file"),
        tls=server_tls(values.pop("tls_cert"), values.pop("tls_key"), values.pop("tls_client_ca")),
        session_tls=session_tls(
            values.pop("session_tls_cert"), values.pop("session_tls_key"), values.pop("session_tls_ca")
        ),
    )


def connection_options(command: Command) -> Command:
    """Add --config and the options to reach routers, which `client_connection` reads.

    Each of them has a variable too, such as BLOCKYARD_TLS_CA for --tls-ca.
    """
    for flag, is_flag, help in reversed(
        (
            ("--tls", True, "Reach routers over TLS."),
            ("--tls-ca", False, "Reach routers over TLS, and trust only this CA."),
            ("--tls-cert", False, "Certificate of this client. Needs --tls-key."),
            ("--tls-key", False, "Key of --tls-cert."),
            (
                "--token-file",
                False,
                "File with this client's token. Default: BLOCKYARD_TOKEN, if set.",
            ),
            ("--plaintext-token", True, "Send the token without TLS too, so that others may read it."),
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
            help=help,
        )(command)
    return config_option(command)


def client_connection() -> dict[str, Any]:
    """Return the TLS and token arguments of Client, from the options of the command that runs.

    Raise ValueError for a token file that cannot be used.
    """
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
