"""Settings, files and names that are odd, huge or made to mislead: one clear message, exit code 2,
no traceback.
"""

import functools
import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedensemble.config import limits

from .command_line import run

BAD_SETTINGS = [
    ("model.dropout=1.5", "dropout to be at least 0 and below 1; got 1.5"),
    ("model.dropout=-0.1", "dropout to be at least 0 and below 1; got -0.1"),
    ("algorithm.optimizer.clip=1e39", "SGD needs clip <= 3.4e+38; got 1e+39"),
    ("algorithm.optimizer.weight_decay=nan", "a setting cannot be nan"),
    ("algorithm.lr=inf", "FedAvg needs lr to be a finite number; got inf"),
    ("data.classes=1", "classes to be an integer >= 2; got classes=1"),
    ("name=" + "a" * 300, "name: string should have at most 100 characters"),
    ("ensemble.modes=1000000000", "needs modes <= 100,000; got 1,000,000,000"),
    ("model.hidden=[1000000000]", "lower ensemble.modes, or use a smaller model"),
    ("model.hidden=[9000000000000000000]", "The model cannot be made, it is too large"),
    ("model.hidden=[0]", "integers of at least 1 in hidden; got 0"),
    ("training.epochs=1000000000", "epochs and steps of at most 1,000,000"),
    ("data.n=1000000000000", "GB are free. Lower them."),
    ("a=" + "[" * 400 + "]" * 400, "nest more than 20 deep"),
    ("a" + ".a" * 400 + "=1", "at most 20 parts"),
    ("rounds=" + "9" * 5000, "holds a value that cannot be read"),
    ("rounds=" + "9" * 25, "at most 64 bits"),
    ("data.path=a\0b", "must be Unicode without NUL"),
    ("rounds=1\nseed=2", "rounds: input should be a valid integer"),
]


@pytest.mark.parametrize(
    ("setting", "message"), BAD_SETTINGS, ids=[repr(s[:40]) for s, _ in BAD_SETTINGS]
)
def test_settings_beyond_limits(folder: Path, setting: str, message: str) -> None:
    code, _, errors = run("run", "small.toml", "--set", setting, cwd=folder)
    assert code == 2 and message in errors, errors
    assert len(errors) < 2000 and "Traceback" not in errors


def test_configs_that_extend_what_is_no_config(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    for number in range(1500):
        (folder / f"chain{number}.toml").write_text(f'extends = "chain{number + 1}.toml"')
    (folder / "large.toml").write_text("#" * (limits.LARGEST_FILE + 1))
    (folder / "deep.toml").write_text("a = " + "[" * 4000 + "]" * 4000)
    (folder / "digits.toml").write_text("rounds = " + "9" * 5000)
    for extended, message in (
        ("fifo", "it is not a regular file"),
        ("/dev/zero", "it is not a regular file"),
        ("a\\u0000b", "must be Unicode without NUL"),
        ("x" * 400, "File name too long"),
        ("chain0.toml", "20 times and more"),
        ("large.toml", "more than 1,000,000 bytes"),
        ("deep.toml", "nest more than 20 deep"),
        ("digits.toml", "holds a value that cannot be read"),
    ):
        (folder / "c.toml").write_text(f'extends = "{extended}"')
        code, _, errors = run("run", "c.toml", cwd=folder)
        assert code == 2 and message in errors, errors
    assert run("run", "/dev/zero", cwd=folder)[0] == 2


def test_a_config_may_come_from_a_pipe(folder: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, (folder / "small.toml").read_bytes())
    os.close(writing)
    code, shown, errors = run("show", f"/dev/fd/{reading}", cwd=folder)
    os.close(reading)
    assert code == 0 and 'name = "small"' in shown, errors


def member(content: bytes, **facts: object) -> bytes:
    """A zip archive with one member x.npy, whose entries in both headers are as given."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content)
    raw = packed.getvalue()
    for old, new in facts.get("changes", ()):  # type: ignore[attr-defined]
        raw = raw.replace(old, new)
    return raw


def npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def bad_archives() -> dict[str, bytes]:
    good = npy(np.zeros((4, 8), np.float32))
    flags, method = b"\x14\x00\x00\x00\x08\x00", b"\x14\x00\x01\x00\x08\x00"
    local, central = b"PK\x03\x04" + flags, b"PK\x01\x02\x14\x03" + flags
    lzma = io.BytesIO()
    with zipfile.ZipFile(lzma, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", good)
    at = lzma.getvalue().index(b"x.npy") + 5
    return {
        "without magic": member(b"no array at all"),
        "encrypted": member(
            good,
            changes=[(local, b"PK\x03\x04" + method), (central, b"PK\x01\x02\x14\x03" + method)],
        ),
        "unknown compression": member(
            good, changes=[(part, part[:-2] + b"\x63\x00") for part in (local, central)]
        ),
        "broken LZMA": lzma.getvalue()[:at] + b"\xff" * 20 + lzma.getvalue()[at + 20 :],
        "unclosed header": member(good.replace(b"}", b" ")),
        "huge claim": member(
            good.replace(b"(4, 8)", b"(4, 8" + b"0" * 1 + b")").replace(
                b"(4, 80)", b"(999999999999,)"
            )
        ),
        "nested header": member(b"\x93NUMPY\x01\x00\x10\x27" + b"(" * 10000),
        "header of version 3": member(good.replace(b"NUMPY\x01", b"NUMPY\x03")),
    }


@pytest.mark.parametrize("kind", bad_archives())
def test_damaged_archives(folder: Path, kind: str) -> None:
    file = folder / "bad.npz"
    file.write_bytes(bad_archives()[kind])
    sets = (
        "--set",
        "data.source=npz",
        "--set",
        f"data.path={file}",
        "--set",
        "data.y=x",
        "--set",
        "data.partition=iid",
    )
    code, _, errors = run("run", "small.toml", *sets, cwd=folder)
    assert code == 2 and "is damaged or of another kind: array 'x' cannot be read" in errors, errors


def test_a_bomb_is_refused_before_it_is_unpacked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "bomb.npz"
    np.savez_compressed(file, x=np.zeros((2_000_000, 10), np.float32), y=np.zeros(2_000_000, int))
    sets = ("--set", "data.source=npz", "--set", f"data.path={file}", "--set", "data.partition=iid")
    monkeypatch.setenv("FEDENSEMBLE_MAX_GB", "0.01")
    code, _, errors = run("run", "small.toml", *sets, cwd=folder)
    assert (
        code == 2
        and "unpacks to 0.08 GB, more than the 0.01 GB" in errors
        and "FEDENSEMBLE_MAX_GB" in errors
    )
    monkeypatch.setenv("FEDENSEMBLE_MAX_GB", "0.09")  # enough for x, not for y as well
    code, _, errors = run("run", "small.toml", *sets, cwd=folder)
    assert code == 2 and "Array 'y'" in errors, errors
    monkeypatch.setenv("FEDENSEMBLE_MAX_GB", "much")
    code, _, errors = run("run", "small.toml", *sets, cwd=folder)
    assert code == 2 and "FEDENSEMBLE_MAX_GB must be a number" in errors


def test_memory_that_runs_out_while_reading_does_not_blame_the_modes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedensemble.config import build

    @functools.wraps(build.datasets["gaussians"])
    def full(**_: object) -> None:
        raise MemoryError

    monkeypatch.setitem(build.datasets._items, "gaussians", full)
    code, _, errors = run("run", "small.toml", cwd=folder)
    assert code == 2 and "The data do not fit into the memory" in errors and "modes" not in errors


@pytest.mark.parametrize("name", ["x[/b]y", "x[red]y", ":smile:"])
def test_brackets_in_a_folder_are_printed(folder: Path, name: str) -> None:
    code, output, errors = run("run", "small.toml", "--set", "rounds=1", "--out", name, cwd=folder)
    assert code == 0 and f"Run: {name}\n" in output and f"Report: {name}/report.html" in output, (
        errors
    )


def test_control_characters_in_a_folder_are_escaped(folder: Path) -> None:
    code, output, _ = run(
        "run", "small.toml", "--set", "rounds=1", "--out", "x\x1b[31m\ny\udcff", cwd=folder
    )
    assert code == 0 and "\x1b" not in output and r"Run: x\x1b[31m\ny\udcff" in output


def test_labels_of_rows_are_shown_as_they_are(folder: Path) -> None:
    labels = ["plain [lr=0.1]", "[/x]", r"\u001b[31m a|b \n", r"$\\frac$ $"]
    rows = "".join(
        f'[[row]]\nlabel = "{label}"\nset = {{seed = 0, "algorithm.lr" = 0.{at}}}\n'
        for at, label in enumerate(labels, 1)
    )
    (folder / "c.toml").write_text(f'base = "small.toml"\nseeds = [0]\n{rows}')
    code, output, errors = run("compare", "c.toml", "--set", "rounds=1", cwd=folder)
    assert code == 0, errors
    assert (
        "| plain [lr=0.1] |" in output
        and "| [/x] |" in output
        and r"| \x1b[31m a\|b \n |" in output
    )
    assert "[/x], seed 0: round 1/1" in output and "\x1b" not in output


def test_files_and_folders_that_cannot_be(folder: Path) -> None:
    code, _, errors = run("run", "small.toml", "--out", "x" * 300, cwd=folder)
    assert code == 2 and "File name too long" in errors
    code, _, errors = run("report", "x" * 300, cwd=folder)
    assert code == 2, errors


def test_a_broken_plug_in_is_named_and_the_others_are_listed(tmp_path: Path) -> None:
    installed = tmp_path / "broken_models-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: broken-models\nVersion: 1.0\n"
    )
    (installed / "entry_points.txt").write_text(
        "[fedensemble.models]\nbroken = broken_models:Net\n"
    )
    (tmp_path / "broken_models.py").write_text("import a_package_that_is_not_there\n")
    found = os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))
    command = [sys.executable, "-m", "fedensemble", "ls", "models"]
    listed = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": found}, capture_output=True, text=True
    )
    assert listed.returncode == 0 and "| mlp |" in listed.stdout, listed.stderr
    assert (
        "The model 'broken' of package 'broken-models' cannot be loaded: ModuleNotFoundError"
        in listed.stdout
    )
    one = subprocess.run(
        [*command, "broken"],
        env={**os.environ, "PYTHONPATH": found},
        capture_output=True,
        text=True,
    )
    assert (
        one.returncode == 2
        and "Traceback" not in one.stderr
        and "uninstall that package" in one.stderr
    )


def test_an_interrupt_while_importing_has_no_traceback(tmp_path: Path) -> None:
    # A module that is imported early, and meets the interrupt.
    (tmp_path / "typer.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    found = os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))
    begun = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "fedensemble", "--help"],
        env={**os.environ, "PYTHONPATH": found},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (
        ended.returncode == 130
        and "Traceback" not in ended.stderr
        and "interrupted" in ended.stderr
    ), ended.stderr
    assert time.monotonic() - begun < 60
