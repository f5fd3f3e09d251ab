"""`plan`, which is `python -m planner`: what happens before the command is imported."""

import signal
import sys

from planner.hashes import fix_hashes

IMPORTING = {"profile", "fit", "train", "quickstart", "selftest"}  # verbs that import a model file


def main() -> int:
    """Run one command with the process's arguments, and return its exit code."""
    handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles:  # Ctrl-C ends the process, and leaves no traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if IMPORTING.intersection(sys.argv[1:]):
        fix_hashes()

    from planner.cli.main import main as run

    if handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
