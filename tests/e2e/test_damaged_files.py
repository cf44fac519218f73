"""Files of a run that are damaged: what is lost, and what to do, is said."""

from pathlib import Path

import numpy as np
import pytest

from .command_line import run
from .test_cli import SMALL
from .test_predict import FEATURES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=3))
    return tmp_path


def test_damaged_modes_and_summary_say_what_to_do(folder: Path) -> None:
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0
    np.savez(folder / "in.npz", x=np.zeros((2, FEATURES), np.float32))
    modes, summary = folder / "a" / "modes.safetensors", folder / "a" / "summary.json"
    whole = modes.read_bytes()
    advice = "Delete a/summary.json and start the run's command again"
    for file, content in ((modes, whole[:-20]), (modes, b"garbage!" * 9), (summary, b"{"), (summary, b"[]")):
        before = file.read_bytes()
        file.write_bytes(content)
        for command in (("predict", "a", "in.npz", "-o", "out.npz"), ("run", "small.toml", "--out", "a")):
            code, _, errors = run(*command, cwd=folder)
            assert code == 2 and file.name in errors and advice in errors, errors
            assert ".." not in errors and "Traceback" not in errors
        file.write_bytes(before)
    modes.write_bytes(b"")
    summary.unlink()
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0
    assert modes.read_bytes() == whole  # the advice is good


def test_damaged_checkpoints_say_where_training_goes_on(folder: Path) -> None:
    assert run("run", "small.toml", "--out", "a", "--checkpoint-seconds", 0, cwd=folder)[0] == 0
    metrics = (folder / "a" / "metrics.jsonl").read_bytes()
    older, newer = sorted((folder / "a" / "checkpoint").iterdir())
    (folder / "a" / "summary.json").unlink()
    newer.write_bytes(newer.read_bytes()[:100])
    code, out, errors = run("run", "small.toml", "--out", "a", "--checkpoint-seconds", 0, cwd=folder)
    assert code == 0, errors
    assert "Going back to the one before." in out and "after round 2" in out and "round 0" not in out
    older, newer = sorted((folder / "a" / "checkpoint").iterdir())
    (folder / "a" / "summary.json").unlink()
    for file in (older, newer):
        file.write_bytes(b"garbage!" * 9)
    code, out, errors = run("run", "small.toml", "--out", "a", cwd=folder)
    assert code == 0, errors
    said = " ".join(out.split())
    assert said.count("Going back to the one before.") == 1
    assert ". There is none before it: starting again from round 0." in said
    assert (folder / "a" / "metrics.jsonl").read_bytes() == metrics
