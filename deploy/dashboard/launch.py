"""Runs Ray's dashboard with our module in it: `python launch.py .../ray/dashboard/dashboard.py ARGUMENTS`.

A script, run by the command that start_hook.py has changed. Whatever is wrong with our module, the dashboard runs.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # As if Python had been given the dashboard's script: this folder must not be where modules are looked for.
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)


def main() -> None:
    import runpy

    try:
        # A subclass of SubprocessModule is all that Ray's dashboard looks for.
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
            print(f"blockyard: the live page takes Ray's token alone: {error!r}", file=sys.stderr)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
