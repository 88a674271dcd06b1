"""Start hook: `ray start` calls it if RAY_START_HOOK names it, and the dashboard gets our live page.

Owns one change in the starting process: the dashboard's command runs launch.py, which runs Ray's own dashboard.
Everything else that Ray starts is unchanged. Ray has no public way to add a page, so this uses its internals. If they
are not as expected or anything fails, the head starts without the page, and a line on stderr says so.
"""

import sys
from functools import wraps
from pathlib import Path
from typing import Any

HOOK_VARIABLE = "RAY_START_HOOK"
TOKEN_FILE_VARIABLE = "BLOCKYARD_TOKEN_FILE"
"""Variable that names the file of the page's token for routers. Commands use it too (deploy/settings/security.py)."""
HOOK = "blockyard.deploy.dashboard.start_hook.start_hook"
DASHBOARD_SCRIPT = "ray/dashboard/dashboard.py"
WITHOUT_OUR_PAGE = frozenset({"--minimal", "--modules-to-load", "--disable-frontend"})
"""Options of a dashboard that should load little. It gets no live page."""


def start_hook(ray_params: object, is_head: bool) -> None:
    """Add the live page to a head's dashboard. Never raise, because Ray must start with the page or without."""
    try:
        if is_head:
            _lead_through_launch()
    except Exception as error:
        print(f"blockyard: the dashboard starts without /blockyard: {error}", file=sys.stderr)


def _lead_through_launch() -> None:
    """Patch Ray's start of processes, so that launch.py starts the dashboard.

    Raise ImportError or AttributeError if Ray lacks what is changed here.
    """
    from ray._private import ray_constants, services

    start_process, dashboard = services.start_ray_process, ray_constants.PROCESS_TYPE_DASHBOARD

    @wraps(start_process)
    def start_ray_process(command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
        if process_type == dashboard:
            command = led_through(command)
        return start_process(command, process_type, *arguments, **options)

    services.start_ray_process = start_ray_process


def led_through(command: list[str]) -> list[str]:
    """Return the dashboard's command with launch.py before its script, and any other command unchanged."""
    options = {argument.partition("=")[0] for argument in command}
    scripts = [index for index, argument in enumerate(command) if argument.endswith(DASHBOARD_SCRIPT)]
    if len(scripts) != 1 or options & WITHOUT_OUR_PAGE:
        return command
    launch = str(Path(__file__).with_name("launch.py"))
    return [*command[: scripts[0]], launch, *command[scripts[0] :]]
