"""Imports torch, unless a program did before, without looking for cycles in what stays anyway.

Looking meanwhile took an eighth of the import, and looking through torch's hundred thousands of
objects again, the last time when Python ends, half a second of every program. What was garbage
before is collected first: `gc.freeze` sets aside all there is; `gc.unfreeze()` takes it back.

As the command line it also ends without a traceback when it is interrupted meanwhile.
"""

import gc
import os
import sys
from types import TracebackType


def is_command_line() -> bool:
    """Whether this process was started as `fedensemble` or `python -m fedensemble`, and not by
    another program.
    """
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    module = sys.orig_argv[1:3] == ["-m", "fedensemble"]
    return name in ("fedensemble", "fedensemble.exe") or (name in ("-m", "__main__.py") and module)


def _end_on_interrupt(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """What Python calls for an exception that nobody catches: an interrupt ends with a line and
    code 130.
    """
    if not issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    print("interrupted; run the same command again to continue.", file=sys.stderr, flush=True)
    os._exit(130)


# Imports take a second, in which there is no code of ours yet that could catch Ctrl-C. Without the
# hook a user who
# changes their mind sees a traceback through the modules of torch. Programs that import the package
# are left alone.
if is_command_line() and sys.excepthook is sys.__excepthook__:
    sys.excepthook = _end_on_interrupt

if "torch" not in sys.modules:
    _looked = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        import torch  # noqa: F401

        gc.freeze()
    finally:
        if _looked:
            gc.enable()
