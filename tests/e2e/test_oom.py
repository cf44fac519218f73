"""Running out of memory on the command line: one message, never a traceback, and what was trained
is kept.
"""

import json
import platform
from pathlib import Path

import pytest
import torch

from fedensemble import Federation
from fedensemble.engines.local.vector import VectorEngine
from fedensemble.engines.stacked import prediction
from fedensemble.experiment import evaluation
from fedensemble.runtime import hardware

from .command_line import run

ON_CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
)
ON_CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: ..."
)


def failing(error: Exception):
    def fail(*args: object, **options: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [ON_CUDA, ON_CPU, MemoryError()], ids=["CUDA", "CPU", "Python"])
@pytest.mark.parametrize(
    ("owner", "name", "code", "message"),
    [
        (VectorEngine, "train", 2, "One visit does not fit into the memory of cpu"),
        (prediction, "member_outputs", 2, "does not fit into the memory of cpu"),
        (evaluation, "evaluate", 2, "Evaluation does not fit into the memory of cpu"),
        (Federation, "run_round", 1, "There is not enough memory: lower ensemble.modes"),
        (Federation, "__init__", 1, "There is not enough memory: lower ensemble.modes"),
    ],
)
def test_no_traceback(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    code: int,
    message: str,
    error: Exception,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing(error))
        got, _, errors = run("run", "small.toml", "--out", "a", cwd=folder)
    assert got == code
    assert message in errors and "Traceback" not in errors
    assert len(errors.splitlines()) <= 2
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0


def test_other_errors_keep_their_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Federation, "run_round", failing(RuntimeError("a mistake of ours")))
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        run("run", "small.toml", cwd=folder)


def test_the_processors_name_is_kept_with_a_run(folder: Path) -> None:
    assert run("run", "small.toml", "--out", "a", "--device", "cpu", cwd=folder)[0] == 0
    assert json.loads((folder / "a" / "env.json").read_text())["device"] == hardware.processor()


def test_the_processors_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text(
        "processor\t: 0\nmodel name\t: Abacus 3000 @ 1 Hz\n"
        "processor\t: 1\nmodel name\t: Abacus 3000\n"
    )
    monkeypatch.setattr(hardware, "Path", lambda name: told)
    assert hardware.processor() == "Abacus 3000 @ 1 Hz"
    told.write_text("Hardware\t: none\n")
    assert hardware.processor() == (platform.processor() or platform.machine())
