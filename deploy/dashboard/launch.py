"""Runs Ray's dashboard with our module in it: `python launch.py .../ray/dashboard/dashboard.py ARGUMENTS`.

A script, run by the command that start_hook.py has changed. The dashboard runs even if our module fails.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # Set up sys.path as if Python ran the dashboard's script, so that modules are not imported from this folder.
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)


def main() -> None:
    import runpy

    try:
        # The import suffices, because Ray's dashboard finds all subclasses of SubprocessModule.
        from blockyard.deploy.dashboard import head_module  # noqa: F401
        from blockyard.deploy.dashboard.metrics_tab import tab_environment
        from blockyard.deploy.dashboard.sign_in import install
    except Exception as error:
        print(f"blockyard: the dashboard runs without /blockyard: {error!r}", file=sys.stderr)
    else:
        try:
            os.environ.update(tab_environment(sys.argv[1:], os.environ))
        except (ValueError, KeyError) as error:
            print(f"blockyard: the Metrics tab stays as it is: {error!r}", file=sys.stderr)
        try:
            install()
        except Exception as error:
            print(f"blockyard: the live page accepts only Ray's token: {error!r}", file=sys.stderr)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
