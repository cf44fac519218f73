"""Damaged files of a run: the message says what is lost and what to do."""

import json
import shutil
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
    for file, content in (
        (modes, whole[:-20]),
        (modes, b"garbage!" * 9),
        (summary, b"{"),
        (summary, b"[]"),
    ):
        before = file.read_bytes()
        file.write_bytes(content)
        for command in (
            ("predict", "a", "in.npz", "-o", "out.npz"),
            ("run", "small.toml", "--out", "a"),
        ):
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
    code, out, errors = run(
        "run", "small.toml", "--out", "a", "--checkpoint-seconds", 0, cwd=folder
    )
    assert code == 0, errors
    assert (
        "Going back to the one before." in out and "after round 2" in out and "round 0" not in out
    )
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, which tests copy."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(SMALL.format(rounds=3))
    assert run("run", "small.toml", "--out", "a", cwd=folder)[0] == 0
    np.savez(folder / "in.npz", x=np.zeros((2, FEATURES), np.float32))
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, as a version without checksums left it: its text files are
    believed.
    """
    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy" / "a" / "checksums.json").unlink()
    return tmp_path / "copy"


def keys_of(value: object, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The paths of all keys of nested JSON; of a list's elements only the first's."""
    found: list[tuple[str | int, ...]] = []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += [(*prefix, key), *keys_of(inner, (*prefix, key))]
    elif isinstance(value, list) and value:
        found += keys_of(value[0], (*prefix, 0))
    return found


def changed(text: str, path: tuple[str | int, ...], value: object = None) -> str:
    """JSON without a key, or with another value for it."""
    held = json.loads(text)
    holder = held
    for part in path[:-1]:
        holder = holder[part]
    if value is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return json.dumps(held)


@pytest.mark.parametrize(
    "name", ["summary.json", "clients.json", "predictions.json", "env.json", "metrics.jsonl"]
)
def test_json_that_lacks_a_key_or_has_another_type_is_no_traceback(copied: Path, name: str) -> None:
    file = copied / "a" / name
    whole = file.read_text()
    first, rest = whole.split("\n", 1) if name == "metrics.jsonl" else (whole, "")
    tried = 0
    for path in keys_of(json.loads(first)):
        for value in (None, "text"):
            file.write_text(changed(first, path, value) + "\n" + rest)
            for command in (("report", "a", "--out", "page.html"), ("ls", "runs", "--runs", ".")):
                code, _, errors = run(*command, cwd=copied)  # raises what would be a traceback
                assert code in (0, 2) and "Traceback" not in errors
                assert code == 0 or "a/" in errors or "in a cannot be shown" in errors, errors
            tried += 1
    assert tried > 10


def test_missing_keys_are_named(copied: Path) -> None:
    folder = copied / "a"
    metrics = (folder / "metrics.jsonl").read_text()
    first, rest = metrics.split("\n", 1)
    (folder / "metrics.jsonl").write_text(changed(first, ("bytes_up",)) + "\n" + rest)
    code, _, errors = run("report", "a", cwd=copied)
    assert (
        code == 2 and "a/metrics.jsonl is damaged: the record of round 1 lacks 'bytes_up'" in errors
    )
    (folder / "metrics.jsonl").write_text(metrics)
    (folder / "summary.json").write_text(changed((folder / "summary.json").read_text(), ("modes",)))
    for command in (
        ("report", "a"),
        ("predict", "a", "in.npz", "-o", "out.npz"),
        ("run", "small.toml", "--out", "a"),
    ):
        code, _, errors = run(*command, cwd=copied)
        assert (
            code == 2
            and "a/summary.json is damaged: it lacks 'modes'" in errors
            and "Delete" in errors
        )
    code, output, _ = run("ls", "runs", "--runs", ".", cwd=copied)
    assert code == 0 and "damaged" in output and "lacks 'modes'" in output


def test_a_config_that_was_cut_short(copied: Path) -> None:
    """Cut between two lines it is valid TOML, and defaults would take the place of what is gone."""
    file = copied / "a" / "config.toml"
    lines = file.read_text().splitlines(keepends=True)
    last = max(at for at, line in enumerate(lines) if line.startswith("dtype"))
    for end in range(last + 1):
        file.write_text("".join(lines[:end]))
        for command in (
            ("report", "a", "--out", "p.html"),
            ("predict", "a", "in.npz", "-o", "out.npz"),
        ):
            code, _, errors = run(*command, cwd=copied)
            assert (
                code == 2
                and "error: a/config.toml " in errors
                and ("lacks" in errors or "cannot be read" in errors)
            )
    assert not (copied / "out.npz").exists() and not (copied / "p.html").exists()


def test_changed_text_files_are_told(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    cwd, predict = tmp_path / "copy", ("predict", "a", "in.npz", "-o", "out.npz")
    assert run("report", "a", cwd=cwd)[2] == "" and run(*predict, cwd=cwd)[0] == 0
    metrics, config = cwd / "a" / "metrics.jsonl", cwd / "a" / "config.toml"
    metrics.write_text(
        metrics.read_text().replace('"loss": 1', '"loss": 2').replace('"loss": 0', '"loss": 1')
    )
    code, _, errors = run("report", "a", cwd=cwd)
    assert code == 0 and errors.startswith("warning: a/metrics.jsonl does not match its checksum")
    assert "does not match its checksum" in (cwd / "a" / "report.html").read_text()
    assert "done, changed since" in run("ls", "runs", "--runs", ".", cwd=cwd)[1]
    assert run(*predict, cwd=cwd)[0] == 0  # records have no part in predictions
    config.write_text(
        config.read_text().replace("probabilities", "logits").replace("hidden = [", "hidden = [ ")
    )
    code, _, errors = run(*predict, cwd=cwd)
    assert (
        code == 2
        and "config.toml does not match its checksum" in errors
        and "Traceback" not in errors
    )
    (cwd / "a" / "checksums.json").unlink()  # as the message says
    assert run(*predict, cwd=cwd)[0] == 0 and run("report", "a", cwd=cwd)[2] == ""


def test_a_report_elsewhere_leaves_the_run_as_it_is(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    cwd = tmp_path / "copy"
    for name in ("report.md", "curves.png", "report.html"):
        (cwd / "a" / name).unlink()

    def stamps() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in (cwd / "a").rglob("*")}

    before, folder = stamps(), (cwd / "a").stat().st_mtime_ns
    code, output, errors = run("report", "a", "--out", "elsewhere/page.html", cwd=cwd)
    assert code == 0 and "Report: elsewhere/page.html" in output, errors
    assert stamps() == before and (cwd / "a").stat().st_mtime_ns == folder
    assert run("report", "a", cwd=cwd)[0] == 0
    assert (cwd / "a" / "report.md").exists() and (cwd / "a" / "curves.png").exists()


def test_an_operating_system_error_names_the_file(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.exists

    def refuse(path: Path, **options: bool) -> bool:
        if path.name == "config.toml":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "exists", refuse)
    code, _, errors = run("report", "a", cwd=copied)
    assert code == 2 and errors == "error: a/config.toml: Permission denied.\n"


def test_metrics_that_cannot_be_read(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "metrics.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    code, _, errors = run("report", "a", cwd=copied)
    assert code == 2 and "a/metrics.jsonl: no permission" in errors
    code, output, _ = run("ls", "runs", "--runs", ".", cwd=copied)
    assert code == 0 and "damaged" in output


def test_a_comparison_tells_of_changed_runs(folder: Path) -> None:
    assert run("compare", "small.toml", "--modes", "1,2", "--seeds", "0", cwd=folder)[0] == 0
    (place,) = (folder / "runs").glob("*/compare-*")
    assert run("report", place, cwd=folder)[0] == 0
    assert "checksum" not in (place / "report.html").read_text()
    metrics = next((folder / "runs").glob("*/*/metrics.jsonl"))
    metrics.write_text(metrics.read_text().replace('"visits": 6', '"visits": 7'))
    assert run("report", place, cwd=folder)[0] == 0
    assert "metrics.jsonl does not match its checksum" in (place / "report.html").read_text()
