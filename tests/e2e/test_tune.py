"""`fedensemble tune` on the command line."""

import re
import sys

from .command_line import run

LR = ("--set", "algorithm.lr=log:0.01..1")


def test_it_searches_writes_the_best_config_and_continues(folder):
    words = ("tune", "small.toml", *LR, "--trials", 3, "--batch", 2, "--metric", "nll")
    code, out, err = run(*words, cwd=folder)
    assert code == 0, err
    rows = re.findall(r"^\| (\d+) \| ([\d.e-]+) \| ([\d.]+) \|$", out, re.MULTILINE)
    assert sorted(number for number, _, _ in rows) == ["1", "2", "3"]
    assert [float(nll) for *_, nll in rows] == sorted(float(nll) for *_, nll in rows)
    assert f"Best: --set algorithm.lr={rows[0][1]}\n" in out
    best = out.rstrip().rpartition("fedensemble run ")[2]
    assert run("tune", *words[1:], cwd=folder)[1].splitlines()[-8:] == out.splitlines()[-8:]
    code, out, err = run("run", best, cwd=folder)
    assert code == 0, err
    assert f"lr = {float(rows[0][1])}\n" in run("show", best, cwd=folder)[1]


def test_mistakes_are_one_message(folder):
    for words, message in [
        (("small.toml",), "nothing to search"),
        (("small.toml", "--set", "algorithm.lr=1..0"), "smaller than the upper"),
        (("small.toml", *LR, "--seeds", "x"), "--seeds takes integers"),
        ((".", *LR), "no config.toml"),
    ]:
        code, _, err = run("tune", *words, cwd=folder)
        assert code == 2 and message in err, err


def test_without_optuna_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = run("tune", "small.toml", *LR, cwd=folder)
    assert code == 2 and 'pip install "fedensemble[tune]"' in err
