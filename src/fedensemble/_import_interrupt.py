"""Ends the command line without a traceback if the user interrupts it while modules are imported.

Imports take a second, in which no code of the command line runs that could catch Ctrl-C. Without
this hook a user who presses it sees a traceback through the modules of torch. Programs that import
the package are left alone.
"""

import os
import sys
from types import TracebackType


def is_command_line() -> bool:
    """True if this process was started as `fedensemble` or `python -m fedensemble`."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    module = sys.orig_argv[1:3] == ["-m", "fedensemble"]
    return name in ("fedensemble", "fedensemble.exe") or (name in ("-m", "__main__.py") and module)


def _exit_on_interrupt(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The process's excepthook: an interrupt prints one line and exits with code 130."""
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print("interrupted; run the same command again to continue.", file=sys.stderr, flush=True)
    os._exit(130)


if is_command_line() and sys.excepthook is sys.__excepthook__:
    sys.excepthook = _exit_on_interrupt
