"""How much is tried, and what must hold: everything either works or raises an error of ours, and
soon.

The cases are the same in every run. FEDENSEMBLE_FUZZ=20 tries twenty times as many,
FEDENSEMBLE_FUZZ_SEED=1 others.
"""

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from hypothesis import HealthCheck, settings

from fedensemble import FedEnsembleError

TIMES = int(os.environ.get("FEDENSEMBLE_FUZZ", "1"))
SEED = int(os.environ.get("FEDENSEMBLE_FUZZ_SEED", "0"))
LONGEST_MESSAGE = 5000  # characters
T = TypeVar("T")


def examples(count: int) -> Any:
    """Hypothesis's settings for `count` cases at the default budget."""
    return settings(
        max_examples=count * TIMES,
        derandomize=SEED == 0,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def generators(purpose: int, count: int) -> list[np.random.Generator]:
    """A random generator for each of `count` cases at the default budget."""
    return [np.random.default_rng([SEED, purpose, case]) for case in range(count * TIMES)]


def attempt(action: Callable[[], T], seconds: float = 20.0, case: object = "") -> T | None:
    """What an action returns, or None if it raised an error of ours; any other exception passes,
    with the case.
    """
    begun = time.monotonic()
    result, message = None, "none"
    try:
        result = action()
    except FedEnsembleError as error:
        message = str(error)
    except Exception as error:
        raise AssertionError(f"{case!r:.500} raised {type(error).__name__}: {error}") from error
    assert 0 < len(message) < LONGEST_MESSAGE, (case, len(message))
    assert time.monotonic() - begun < seconds, (case, "slow")
    return result


def mutated(content: bytes, random: np.random.Generator, words: tuple[bytes, ...] = ()) -> bytes:
    """The content with one to four random changes: bits flipped, bytes zeroed, cut, doubled, or
    words put in.
    """
    changed = bytearray(content)
    for _ in range(random.integers(1, 5)):
        if not changed:
            break
        at, length = int(random.integers(len(changed))), int(random.integers(1, 9))
        kind = random.integers(6 if words else 5)
        if kind == 0:
            changed[at] ^= 1 << int(random.integers(8))
        elif kind == 1:
            changed[at : at + length] = bytes(len(changed[at : at + length]))
        elif kind == 2:
            del changed[at : at + length * int(random.choice([1, 1, 100]))]
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            changed[at : at + length] = random.bytes(length)
        else:
            word = words[random.integers(len(words))]
            changed[at : at + int(random.choice([0, len(word)]))] = word
    return bytes(changed)
