"""Entry points: the command `longshore`, and what engines call.

They check first that no folder of the user's hides our packages. The command goes on in `cluster.command_line.cli`.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Sequence

from longshore.installation import PackageShadowed, check_packages

EXIT_INTERRUPTED = 130
EXIT_SHADOWED = 7  # both as in cluster.command_line.answers, which cannot be imported when this is needed


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (the table is in `cluster.command_line.answers`)."""
    try:
        check_packages()
    except PackageShadowed as error:
        print(f"longshore: {error}", file=sys.stderr)
        if "--json" in (sys.argv[1:] if argv is None else argv):
            document = {
                "type": "PackageShadowed",
                "message": error.message,
                "hint": error.hint,
                "details": error.details,
            }
            print(json.dumps({"error": document, "exit_code": EXIT_SHADOWED}, indent=2))
        return EXIT_SHADOWED
    from cluster.command_line.cli import main as run

    code = run(argv)
    if code == EXIT_INTERRUPTED and threading.current_thread() is threading.main_thread():
        # A second Ctrl-C, while what was joined is left, ends the process, and not in a traceback of the interpreter's.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def vllm() -> None:
    """Register the load format "longshore". vLLM calls this in each of its processes, maybe more than once."""
    check_packages("engines")
    import engines.vllm  # noqa: F401
