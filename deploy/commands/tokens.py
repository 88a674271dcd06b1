"""`blockyard token`: creates, lists, rotates and revokes the tokens in an auth file.

Owns changes of the file: atomic, one writer at a time, never readable for others. Does not own the meaning of an entry
(router/admission/token_entries.py). Routers reload the file themselves.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from blockyard.deploy.settings.options import output_option
from blockyard.router.admission.auth import Role
from blockyard.router.admission.rate_limits import RateLimit
from blockyard.router.admission.token_entries import (
    Document,
    Entry,
    new_token,
    parse_document,
    parse_time,
    parse_tokens,
    revoked,
    rotated,
)
from blockyard.router.admission.token_file import TokenFile

_AUTH_FILE = click.Path(dir_okay=False, path_type=Path)
_PER_MINUTE = click.IntRange(min=1)
_COLUMNS = ("name", "role", "tenant", "requests_per_minute", "tokens_per_minute", "expires")

auth_file_option = click.option(
    "--auth-file", type=_AUTH_FILE, required=True, help="File that holds the tokens."
)
name_option = click.option("--name", required=True, help="Owner of the tokens.")


@click.group()
def token() -> None:
    """Manage the tokens with which clients authenticate."""


@token.command()
@click.option("--name", required=True, help="Owner of the token, as written in the audit log.")
@click.option("--role", type=click.Choice([role.value for role in Role]), required=True)
@click.option("--tenant", help="Tenant to which requests and prefixes belong. Default: the name.")
@click.option(
    "--requests-per-minute",
    type=_PER_MINUTE,
    help="Limit at each router. A request with several prompts counts once for each.",
)
@click.option(
    "--tokens-per-minute", type=_PER_MINUTE, help="Limit at each router, of prompt and generated tokens."
)
@click.option("--expires", help="Time in UTC from which it is refused, such as 2026-12-31T00:00:00Z.")
@click.option(
    "--auth-file",
    type=_AUTH_FILE,
    help="Add the entry to this file, which is created if missing. Routers accept the token within seconds.",
)
@output_option
def new(
    name: str,
    role: str,
    tenant: str | None,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    expires: str | None,
    auth_file: Path | None,
    output: str,
) -> None:
    """Create a token and print it on stdout. It is not shown again."""
    limit = RateLimit(requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute)
    ends = None if expires is None else parse_time(expires, "--expires")
    if ends is not None and ends <= datetime.now(UTC):
        raise ValueError(f"--expires must be in the future, not {expires}")
    drawn, entry = new_token(name, role, tenant, limit=limit, expires=ends)
    if auth_file is not None:
        append_entry(auth_file, entry)
    about = (
        f"entry for the auth file: {json.dumps(entry)}"
        if auth_file is None
        else f"added a token of {name!r} to {auth_file}"
    )
    _show(drawn, entry, about, output)


@token.command("list")
@auth_file_option
@output_option
def list_tokens(auth_file: Path, output: str) -> None:
    """List the owners of a file's tokens, and the limits of tenants. The tokens themselves are not in the file."""
    TokenFile(auth_file)
    document = parse_document(auth_file.read_text("utf-8"))
    shown = [{column: entry.get(column) for column in _COLUMNS} for entry in document.entries]
    if output == "json":
        click.echo(json.dumps({"tokens": shown, "tenants": document.tenants}, indent=2))
        return
    for entry in shown:
        click.echo("  ".join(f"{column}={value}" for column, value in entry.items() if value is not None))
    for tenant, limits in document.tenants.items():
        click.echo(
            "  ".join([f"limits of tenant {tenant}:", *(f"{key}={value}" for key, value in limits.items())])
        )


@token.command()
@name_option
@auth_file_option
@click.option(
    "--overlap-seconds",
    type=click.FloatRange(min=0),
    default=86_400.0,
    show_default=True,
    help="Seconds for which earlier tokens of the name stay valid.",
)
@output_option
def rotate(name: str, auth_file: Path, overlap_seconds: float, output: str) -> None:
    """Create another token for a name and print it once. Earlier tokens of the name expire after the overlap."""
    drawn = ""
    entries: list[Entry] = []

    def change(document: Document) -> Document:
        nonlocal drawn, entries
        now = datetime.now(UTC)
        drawn, entries = rotated(document.entries, name, overlap_seconds=overlap_seconds, now=now)
        return replace(document, entries=entries)

    change_file(auth_file, change)
    _show(drawn, entries[-1], f"added another token of {name!r} to {auth_file}", output)


@token.command()
@name_option
@auth_file_option
@output_option
def revoke(name: str, auth_file: Path, output: str) -> None:
    """Remove all tokens of a name. Routers refuse them within seconds; running requests continue."""
    change_file(auth_file, lambda document: replace(document, entries=revoked(document.entries, name)))
    if output == "json":
        click.echo(json.dumps({"revoked": name}, indent=2))
        return
    click.echo(f"removed all tokens of {name!r} from {auth_file}", err=True)


def _show(drawn: str, entry: Entry, about: str, output: str) -> None:
    if output == "json":
        click.echo(json.dumps({"token": drawn, "entry": entry}, indent=2))
        return
    click.echo(about, err=True)
    click.echo(drawn)


def append_entry(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry to the auth file, which is created if missing. `change_file` has the rules."""
    change_file(path, lambda document: replace(document, entries=[*document.entries, entry]), makes_file=True)


def change_file(path: Path, change: Callable[[Document], Document], *, makes_file: bool = False) -> None:
    """Replace an auth file by the result of `change`, atomically and with one writer at a time. Keep its permissions.

    Raise ValueError if the file is invalid before or after the change.
    """
    with _locked(path.parent):
        document, before = Document(), None
        if path.exists() or not makes_file:
            TokenFile(path)
            document, before = parse_document(path.read_text("utf-8")), path.stat()
        text = change(document).text()
        parse_tokens(text)
        partial = path.with_name(f".{path.name}.partial")
        partial.unlink(missing_ok=True)  # A killed command may have left one.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if before is not None:
                os.fchown(descriptor, -1, before.st_gid)
                os.fchmod(descriptor, before.st_mode & 0o777)
            file.write(text + "\n")
            file.flush()
            os.fsync(descriptor)
        partial.replace(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
