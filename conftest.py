"""For pytest: modules that need Triton (machines with a GPU) or Flower (an extra) are not searched
without it.
"""

from importlib.util import find_spec

import pytest

_NEEDED = {
    "triton": ["src/fedensemble/engines/kernels/triton/*.py"],
    "flwr": [
        "src/fedensemble/engines/flower/*.py",
        "src/fedensemble/deploy/server.py",
        "src/fedensemble/deploy/template/*.py",
        "tests/fleet/*.py",
        "tests/unit/engines/flower/*.py",
    ],
}
collect_ignore_glob = [
    path for package, paths in _NEEDED.items() if not find_spec(package) for path in paths
]


def pytest_collection_modifyitems(items):
    """Puts tests/fleet first: it takes longest, and most of the time it waits."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/fleet/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With --dist loadgroup, one process for tests/fleet, and one for each other file.

    Otherwise each process would make the fixtures of a module for itself, such as a trained model.
    `xdist_group` is not used: under pytest 9.2, xdist 3.8 does not see its own marks.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    # In the order of collection, in which folders with long tests come first.
    config.option.loadscopereorder = False

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            return "fleet" if nodeid.startswith("tests/fleet/") else nodeid.split("::")[0]

    return ByFile(config, log)
