"""The host machine: the name of its CPU, for reports, and its free memory."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """The CPU's model name, or its architecture if the model is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def free_memory() -> int:
    """Bytes of the host's memory that are free."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: assume that half of the memory is free
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
