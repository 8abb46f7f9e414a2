"""The command `longshore`: check whose packages these are, then hand over to `cluster.command_line.cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from longshore.install_check import PackageShadowed, check_packages

EXIT_SHADOWED = 7  # as in cluster.command_line.exit_codes, which cannot be imported when this is needed


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (the table is in `cluster.command_line.exit_codes`)."""
    try:
        check_packages()
    except PackageShadowed as error:
        print(f"longshore: {error}", file=sys.stderr)
        return EXIT_SHADOWED
    from cluster.command_line.cli import main as run

    return run(argv)
