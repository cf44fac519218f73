"""Notes on a run are printed, and only once."""

from pathlib import Path

import pytest

from fedensemble.engines.local.vector import VectorEngine
from fedensemble.engines.stacked.equivalence import StackingReport

from .command_line import run
from .test_cli import SMALL

WARNING = (
    "fedsplit assumes that all clients take part in every round: with 6 of 12, the server "
    "uses only the clients that report, and the other clients keep their state."
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL.format(rounds=2))
    return tmp_path


def lines(text: str) -> str:
    return text.replace("\n", " ")


def test_partial_participation_where_the_method_assumes_all(folder: Path) -> None:
    code, out, errors = run("run", "small.toml", "--set", "algorithm.name=fedsplit", cwd=folder)
    assert code == 0, errors
    assert lines(out).count(WARNING) == 1
    everybody = ["ensemble.clients_per_round=12", "ensemble.strata=3"]
    for said, settings in [
        # a client trains one of three modes: none has them all
        (1, ["algorithm.name=fedsplit", *everybody]),
        (
            0,
            [
                "algorithm.name=fedsplit",
                "ensemble.clients_per_round=12",
                "ensemble.modes=1",
                "ensemble.strata=1",
            ],
        ),
        (0, ["algorithm.name=fedsplit", "algorithm.average=all"]),
        (0, ["algorithm.name=fedpd", "algorithm.average=all", *everybody]),
        (0, ["algorithm.name=fedavg"]),
    ]:
        code, out, errors = run(
            "run", "small.toml", *(p for s in settings for p in ("--set", s)), cwd=folder
        )
        assert code == 0, errors
        assert (
            lines(out).count(
                "take part in every round: with 3 modes, of which each client trains one,"
            )
            == said
        )
        assert out.count("take part") == said, settings


def test_a_comparison_says_it_once_a_method(folder: Path) -> None:
    command = [
        "compare",
        "small.toml",
        "--algorithms",
        "fedavg,fedsplit,diana",
        "--seeds",
        "0,1",
        "--modes",
        "1,3",
    ]
    code, out, errors = run(*command, "--set", "ensemble.strata=1", cwd=folder)
    assert code == 0, errors
    assert lines(out).count(WARNING) == 1
    assert lines(out).count("take part in every round") == 2
    assert "fedavg assumes" not in out


def test_fedprox_that_is_fedavg(folder: Path) -> None:
    said = "With one local step FedProx is FedAvg"
    one = ["--set", "training.steps=1"]
    for told, settings in [
        (1, ["--set", "algorithm.name=fedprox", *one]),
        (0, ["--set", "algorithm.name=fedprox", "--set", "training.steps=2"]),
        (0, ["--set", "algorithm.name=fedprox", "--set", "algorithm.mu=0.0", *one]),
        (0, one),
    ]:
        code, out, errors = run("run", "small.toml", *settings, cwd=folder)
        assert code == 0, errors
        assert lines(out).count(said) == told, settings


def test_a_test_of_an_earlier_round_is_told_as_such(folder: Path) -> None:
    # lines at 2, 4, ..., tests at 5, 10 and 14
    (folder / "small.toml").write_text(SMALL.format(rounds=14))
    code, out, errors = run("run", "small.toml", cwd=folder)
    assert code == 0, errors
    ends = {
        line.split("/14")[0].split()[-1]: line.rstrip()
        for line in out.splitlines()
        if "/14 " in line
    }
    assert not any("ensemble" in ends[n] or "(round" in ends[n] for n in ("2", "4"))
    assert all(ends[n].endswith("%  (round 5)") for n in ("6", "8"))
    assert (
        ends["10"].endswith("%")
        and ends["12"].endswith("%  (round 10)")
        and ends["14"].endswith("%")
    )


def test_the_engines_notes_are_said_at_the_start_and_new_ones_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Talking(VectorEngine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.notes = ["Known from the start."]

        def train(self, *args):
            if "Found on the way." not in self.notes:
                self.notes.append("Found on the way.")
            return super().train(*args)

    from fedensemble.core.engine import engines

    monkeypatch.setitem(engines._items, "talking", Talking)
    code, out, errors = run("run", "small.toml", "--set", "engine.name=talking", cwd=folder)
    assert code == 0, errors
    assert out.count("Known from the start.") == out.count("Found on the way.") == 1
    assert (
        out.index("Known from the start.") < out.index("round 1/2") < out.index("Found on the way.")
    )


def test_vmap_is_mentioned_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fedensemble.engines.local.vector.check_stackable",
        lambda *given: StackingReport("it is round"),
    )
    code, out, errors = run("run", "small.toml", cwd=folder)
    assert code == 0, errors
    said = "The model cannot be batched layer by layer (it is round); using vmap, which is slower."
    assert lines(out).count(said) == 1 and said not in errors
