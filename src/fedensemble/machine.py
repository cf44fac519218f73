"""The machine in words."""

import platform
from pathlib import Path


def processor() -> str:
    """The processor's name; of which kind it is where nobody knows more."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
