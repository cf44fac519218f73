"""What the fuzz tests share."""

import pytest

from fedensemble import arguments
from fedensemble.data.sources import archive
from fedensemble.runtime import oom


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are compared with 1 GB, whatever machine this is, so that no case can take more of
    it.
    """
    for module in (archive, arguments, oom):
        monkeypatch.setattr(module, "free_memory", lambda: 10**9)
