"""Memory of local training on a CPU is kept between steps, unless the user decided about it."""

import os
import platform
import subprocess
import sys

import pytest

TAKEN_AGAIN = """
import resource, torch
from fedensemble.runtime.malloc import keep_freed_memory
print(keep_freed_memory())
torch.set_num_threads(1)
def work():
    for _ in range(20):
        pieces = [torch.ones(2_000_000) for _ in range(4)]  # 8 MB each
        del pieces
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def said(**variables):
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    done = subprocess.run(
        [sys.executable, "-c", TAKEN_AGAIN],
        capture_output=True,
        text=True,
        check=True,
        env={**plain, **variables},
    )
    kept, pages = done.stdout.split()
    return kept == "True", int(pages)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back so eagerly"
)
def test_freed_memory_is_kept_for_the_next_step():
    kept, pages = said()
    assert kept
    assert pages < 2000  # 80 pieces have 156,000


def test_a_users_settings_are_left_alone():
    kept, _ = said(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
