"""What `ray start` calls where RAY_START_HOOK names it: the dashboard that it starts gets our live page.

Owns one change of the starting process alone: the dashboard's command runs launch.py, which runs Ray's own dashboard.
Everything else that Ray starts is as it would be. Ray has no public way to add a page, so this stands on internals of
it. Where they are not as expected, or if anything goes wrong, the head starts as if we were not there, and says so on
stderr.
"""

import sys
from functools import wraps
from pathlib import Path
from typing import Any

HOOK_VARIABLE = "RAY_START_HOOK"
TOKEN_FILE_VARIABLE = "BLOCKYARD_TOKEN_FILE"
"""As of each command (deploy/settings/security.py): the token that the page shows to routers."""
HOOK = "blockyard.deploy.dashboard.start_hook.start_hook"
DASHBOARD_SCRIPT = "ray/dashboard/dashboard.py"
WITHOUT_OUR_PAGE = frozenset({"--minimal", "--modules-to-load", "--disable-frontend"})
"""A dashboard that is told to load next to nothing gets nothing from us."""


def start_hook(ray_params: object, is_head: bool) -> None:
    """Never raises: whoever starts a cluster wants it to run, with our page or without."""
    try:
        if is_head:
            _lead_through_launch()
    except Exception as error:
        print(f"blockyard: the dashboard starts without /blockyard: {error}", file=sys.stderr)


def _lead_through_launch() -> None:
    """Raises ImportError or AttributeError for a Ray that has not what is changed here."""
    from ray._private import ray_constants, services

    start_process, dashboard = services.start_ray_process, ray_constants.PROCESS_TYPE_DASHBOARD

    @wraps(start_process)
    def start_ray_process(command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
        if process_type == dashboard:
            command = led_through(command)
        return start_process(command, process_type, *arguments, **options)

    services.start_ray_process = start_ray_process


def led_through(command: list[str]) -> list[str]:
    """The dashboard's command with launch.py before its script; any other command as it is."""
    options = {argument.partition("=")[0] for argument in command}
    scripts = [place for place, argument in enumerate(command) if argument.endswith(DASHBOARD_SCRIPT)]
    if len(scripts) != 1 or options & WITHOUT_OUR_PAGE:
        return command
    launch = str(Path(__file__).with_name("launch.py"))
    return [*command[: scripts[0]], launch, *command[scripts[0] :]]
