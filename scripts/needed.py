"""End a script in one line if its Python lacks packages."""

import sys
from importlib.util import find_spec


def check_packages(*names: str) -> None:
    """Exit with code 2 and name the packages that are missing; call it before importing them."""
    if missing := [name for name in names if not find_spec(name)]:
        print(
            f"error: {sys.executable} lacks {', '.join(missing)}; install them with pip, or run "
            "source .venv/bin/activate in the project's folder",
            file=sys.stderr,
        )
        sys.exit(2)
