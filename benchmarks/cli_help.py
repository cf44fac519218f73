"""How long the help of each command takes, and the ratio to an empty Python program.

    python benchmarks/cli_help.py [--repeats 10]

Each time is the shortest of several, wall clock. Commands take turns, so that a busy machine slows
all of them down.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

EMPTY = ("-c", "pass")
TORCH = ("-c", "import torch")
COMMANDS = (
    (),
    ("new",),
    ("run",),
    ("compare",),
    ("tune",),
    ("reproduce",),
    ("predict",),
    ("report",),
    ("watch",),
    ("deploy",),
    ("show",),
    ("ls",),
    ("rm",),
    ("bench",),
    ("data", "get"),
    ("fleet", "gateway"),
)


def measure(arguments: tuple[str, ...]) -> float:
    """Returns the seconds that Python with these arguments takes."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    """Measures all programs and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    programs = {"python -c pass": EMPTY, "python -c 'import torch'": TORCH} | {
        " ".join(("fedensemble", *words, "--help")): ("-m", "fedensemble", *words, "--help")
        for words in COMMANDS
    }
    seconds = dict.fromkeys(programs, float("inf"))
    for _ in range(repeats):
        for name, arguments in programs.items():
            seconds[name] = min(seconds[name], measure(arguments))
    print("| program | ms | ratio |\n| --- | ---: | ---: |")
    for name, taken in seconds.items():
        print(f"| {name} | {1000 * taken:.0f} | {taken / seconds['python -c pass']:.1f} |")


if __name__ == "__main__":
    main()
