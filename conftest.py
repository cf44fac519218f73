"""For pytest: modules that need Triton (machines with a GPU) or Flower (an extra) are not searched without it."""

from importlib.util import find_spec

_NEEDED = {
    "triton": ["src/fedensemble/engines/triton_*.py"],
    "flwr": ["src/fedensemble/engines/flower/*.py", "src/fedensemble/deploy/fleet.py",
             "src/fedensemble/deploy/template/*.py", "tests/fleet/*.py", "tests/unit/flower/*.py"],
}  # fmt: skip
collect_ignore_glob = [path for package, paths in _NEEDED.items() if not find_spec(package) for path in paths]
