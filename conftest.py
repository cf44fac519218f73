"""For pytest: without Triton, which only machines with a GPU have, its kernels are not searched for doctests."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/fedensemble/engines/triton_*.py"]
