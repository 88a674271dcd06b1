"""`blockyard open`: opens the live page in a browser, signed in.

Owns the choice between a browser and printing. dashboard/sign_in.py makes the URL.
"""

import os
import sys
import webbrowser
from pathlib import Path

import click
from blockyard.deploy.commands.printing import show
from blockyard.deploy.dashboard.sign_in import page_url
from blockyard.deploy.machine import state
from blockyard.deploy.settings.options import cluster_option, output_option

WINDOW_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Linux can open a window only if one of these is set. Otherwise there is at most a text browser."""
DOOR_NAME = "live-page.html"
DOOR = '<!doctype html><meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0; url={url}">\n'


@click.command("open")
@click.option("--no-browser", is_flag=True, help="Open no browser. Print the URL that signs in.")
@cluster_option
@output_option
def open_page(no_browser: bool, cluster: str, output: str) -> None:
    """Open the live page, signed in. Without a browser, print the URL that signs in.

    Anybody with the URL can see the page as long as the cluster's Ray runs."""
    remembered = state.load(cluster)
    if remembered.dashboard_url is None:
        raise click.ClickException(f"cluster {cluster} has no dashboard, and so no live page")
    url = page_url(remembered.dashboard_url, remembered.ray_token_path)
    is_open = not no_browser and _has_window() and _open(url, remembered.directory)
    show(output, {"url": url, "opened": is_open}, f"opened {url.partition('#')[0]}" if is_open else url)


def _has_window() -> bool:
    return sys.platform != "linux" or any(os.environ.get(name) for name in WINDOW_VARIABLES)


def _open(url: str, directory: str | None) -> bool:
    """Open the URL in a browser, and return whether that worked.

    The browser gets a file of mode 0600 that leads to the URL, because every user can read a program's arguments.
    """
    door = Path(directory or state.home()) / DOOR_NAME
    try:
        door.unlink(missing_ok=True)
        with os.fdopen(os.open(door, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(DOOR.format(url=url))
        return webbrowser.open(door.as_uri())
    except (OSError, webbrowser.Error):
        return False
