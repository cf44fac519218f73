"""The process keeps freed memory between training steps, unless the user has tuned malloc."""

import os
import platform
import subprocess
import sys

import pytest

ALLOCATE_AGAIN = """
import resource, torch
from fedensemble.runtime.malloc import keep_freed_memory
print(keep_freed_memory())
torch.set_num_threads(1)
def work():
    for _ in range(20):
        blocks = [torch.ones(2_000_000) for _ in range(4)]  # 8 MB each
        del blocks
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**variables):
    """Whether the setting was accepted, and page faults of a loop that allocates and frees."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATE_AGAIN],
        capture_output=True,
        text=True,
        check=True,
        env={**plain, **variables},
    )
    accepted, faults = done.stdout.split()
    return accepted == "True", int(faults)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc returns freed memory so eagerly"
)
def test_freed_memory_is_kept_for_the_next_step():
    accepted, faults = page_faults()
    assert accepted
    assert faults < 2000  # 80 blocks have 156,000 pages


def test_a_users_settings_take_precedence():
    accepted, _ = page_faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert not accepted
